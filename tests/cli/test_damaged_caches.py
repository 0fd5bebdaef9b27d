"""Damaged files of the cache change no score and no text, and end no run."""

import json
import os
from pathlib import Path

import pytest
from damages import damaged
from programs import TEXT, process

from tests.variants import thinned


@pytest.mark.parametrize("seed", thinned(range(10), [0]))
def test_scores_do_not_depend_on_damaged_tokens(run, model, seed):
    Path("text.txt").write_bytes(TEXT * 20)
    Path("other.txt").write_bytes(TEXT[1:] * 20)

    def score(name):
        done = run("eval", name, "-m", "tiny", "--json", "-q")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        return found["bits_per_byte"], found["tokens"], found["bytes"]

    cache = Path(os.environ["XLCLI_CACHE"])
    score("other.txt")
    [other] = cache.glob("*.tokens")
    expected = score("text.txt")
    [path] = set(cache.glob("*.tokens")) - {other}
    data = path.read_bytes()
    for kind, content in damaged(data, other.read_bytes(), n=10, seed=seed):
        path.write_bytes(content)
        assert score("text.txt") == expected, kind
        assert path.read_bytes() == data, kind


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_text_does_not_depend_on_damaged_kernels(model, tmp_path):
    """Each file of a kernel and of its parts is damaged in another way."""
    folder = tmp_path / "kernels"

    def generate():
        arguments = ("generate", "The", "-m", "tiny", "--mem-len", "16", "-n", "20", "--seed", "1", "-q")
        done = process(*arguments, env={"NUMBA_CACHE_DIR": str(folder)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = generate()
    paths = sorted(folder.iterdir())
    contents = {path: path.read_bytes() for path in paths}
    kinds = damaged(contents[paths[0]], contents[paths[1]], n=len(paths))
    for path, (kind, _) in zip(paths, kinds, strict=True):
        other = paths[1] if path == paths[0] else paths[0]
        found = dict(damaged(contents[path], contents[other], n=20))
        path.write_bytes(found[kind])
    assert generate() == expected
    [whole] = folder.glob("decode_token.*")
    again = whole.read_bytes()
    assert generate() == expected
    assert whole.read_bytes() == again, "it was compiled once"
