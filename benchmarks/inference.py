"""Speed of inference in xlcli and in the programs that people run instead: a token, a prompt, a text.

    python benchmarks/inference.py --peers PYTHON [--mem-lens 512 3800] [--entrants NAME ...] [--rounds 3] [--write]

Three tables, each entrant in all of them where it can:

    decode   milliseconds per generated token with full memory, batch 1
    prefill  tokens per second of reading a prompt as long as the memory, from an empty one
    eval     tokens per second of scoring a text in segments of 128 and 512 tokens with full memory

PYTHON is the interpreter of an environment with the peers; without it they are left out:

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0 transformers==4.35.2 llama-cpp-python gguf sentencepiece

transformers 4.35.2 is the last release with a Transformer-XL that runs. All models have 12 layers, width 512, 8 heads,
feed-forward 2,048 (llama.cpp: gated, 1,376), 256 symbols, 38 M parameters besides positions, random weights and random
tokens. Each measurement runs in its own process, the entrants in turn, `--rounds` times; the median of the rounds
counts. Compare the figures of one run only; run it on an idle machine. `--write` replaces those entrants and memory
lengths in the result.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "inference.json"
LAYERS, DIM, HEADS, FFN, VOCAB = 12, 512, 8, 2048, 256
GATED_FFN = 1376
"""Feed-forward width of llama.cpp, whose three matrices are about as large as two of `FFN`."""
TOKENS, WARMUP = 40, 5
"""Timed and untimed tokens of decoding."""
SEGMENTS = (128, 512)
"""Segment lengths of evaluation."""
EVAL_CALLS = 3
XL64, XL512 = {"kind": "xl", "n_features": 64}, {"kind": "xl", "n_features": 512}
HALF = {"memory_dtype": "bfloat16"}
INT8 = {"weight_dtype": "int8", "memory_dtype": "bfloat16"}
INT8_MEMORY = {"weight_dtype": "int8", "memory_dtype": "int8"}
OURS = {
    "xlcli, XL, 64 features": {"position": XL64},
    "xlcli, XL, 512 features": {"position": XL512},
    "xlcli, rotary": {"position": {"kind": "rope"}},
    "xlcli, XL, 64 features, bfloat16": {"position": XL64, "runtime": {"dtype": "bfloat16"}},
    "xlcli, rotary, bfloat16": {"position": {"kind": "rope"}, "runtime": {"dtype": "bfloat16"}},
    "xlcli, XL, 64 features, 16-bit memory": {"position": XL64, "generate": HALF},
    "xlcli, XL, 64 features, without Numba": {"position": XL64, "numba": False},
    "xlcli, rotary, without Numba": {"position": {"kind": "rope"}, "numba": False},
    "xlcli, XL, 512 features, 16-bit memory": {"position": XL512, "generate": HALF},
    "xlcli, rotary, 16-bit memory": {"position": {"kind": "rope"}, "generate": HALF},
    "xlcli, XL, 64 features, int8 weights, 16-bit memory": {"position": XL64, "generate": INT8},
    "xlcli, rotary, int8 weights, 16-bit memory": {"position": {"kind": "rope"}, "generate": INT8},
    "xlcli, XL, 64 features, int8 weights, int8 memory": {"position": XL64, "generate": INT8_MEMORY},
    "xlcli, rotary, int8 weights, int8 memory": {"position": {"kind": "rope"}, "generate": INT8_MEMORY},
    "xlcli, XL, 512 features, int8 weights, 16-bit memory": {"position": XL512, "generate": INT8},
    "xlcli, XL, 512 features, int8 weights, int8 memory": {"position": XL512, "generate": INT8_MEMORY},
}
"""Our entrants: settings over preset peer-12x512; of `generate` number types of weights and memory; whether tokens are
decoded by compiled kernels where these apply."""
PEERS = ("transformers, Transformer-XL", "transformers, GPT-2", "llama.cpp, float32", "llama.cpp, q8_0")


def measure_ours(spec):
    """Figures of one of our models, in a session as `xlcli generate` uses it."""
    import numpy as np
    import torch

    from xlcli import config
    from xlcli.bench import untrained
    from xlcli.config import GenerateConfig
    from xlcli.inference import InferenceSession
    from xlcli.presets import read_preset
    from xlcli.runtime import make_runtime

    own = OURS[spec["who"]]
    mem_len = spec["mem_len"]
    options = GenerateConfig(mem_len=mem_len, **own.get("generate", {}))
    runtime_settings = {"device": "cpu", "threads": spec["threads"]} | own.get("runtime", {})
    made = config.make(
        read_preset("peer-12x512"),
        {
            "model": {"position": own["position"]},
            "runtime": runtime_settings,
            "bench": {"weight_dtype": options.weight_dtype},
        },
    )
    runtime = make_runtime(made.runtime)
    model = untrained("peer-12x512", made, runtime)
    if not own.get("numba", True):
        vars(model)["decoder"] = model.network
    session = InferenceSession.open(model, runtime, options, None)
    random = np.random.default_rng(0)
    session.read(random.integers(0, VOCAB, 600), lambda: False)  # starts threads, fills caches of position tables
    session.reset()
    prompt = random.integers(0, VOCAB, mem_len)
    found = {"prefill": mem_len / seconds(lambda: session.read(prompt, lambda: False))}
    times = []
    for token in random.integers(0, VOCAB, WARMUP + TOKENS):
        session.last_tokens = [int(token)]
        times.append(seconds(session.predict))
    found["decode"] = 1e3 * statistics.median(times[WARMUP:])
    state = session.state
    for segment in SEGMENTS:
        x, y = torch.randint(0, VOCAB, (2, 1, segment))
        times = []
        for _ in range(1 + EVAL_CALLS):
            with torch.inference_mode(), runtime.autocast():
                started = time.perf_counter()
                _, state = model.network.score(x, y, state)[:2]
                times.append(time.perf_counter() - started)
        found[f"eval {segment}"] = segment / statistics.median(times[1:])
    return found


def measure_transformer_xl(spec):
    """Transformer-XL of transformers, whose memory is the inputs of the layers."""
    import torch
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    mem_len = spec["mem_len"]
    settings = TransfoXLConfig(
        vocab_size=VOCAB, cutoffs=[], d_model=DIM, d_embed=DIM, n_head=HEADS, d_head=DIM // HEADS, d_inner=FFN,
        n_layer=LAYERS, mem_len=mem_len, clamp_len=-1, same_length=True, adaptive=False, div_val=1,
    )  # fmt: skip
    model = TransfoXLLMHeadModel(settings).eval()
    memory = [torch.randn(mem_len, 1, DIM) for _ in range(LAYERS)]
    found = {}
    for name, length, calls in (("decode", 1, 8), (f"eval {SEGMENTS[0]}", SEGMENTS[0], EVAL_CALLS)):
        tokens = torch.randint(0, VOCAB, (1, length))
        median = statistics.median([seconds(lambda x=tokens: model(x, mems=memory)) for _ in range(calls + 2)][2:])
        found[name] = 1e3 * median if name == "decode" else length / median
    return found


def measure_gpt2(spec):
    """GPT-2 of transformers with its cache of keys and values, which it copies for every token."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    mem_len = spec["mem_len"]
    settings = GPT2Config(
        vocab_size=VOCAB, n_positions=mem_len + 8, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(settings).eval()
    prompt, token = torch.randint(0, VOCAB, (1, mem_len)), torch.randint(0, VOCAB, (1, 1))
    model(prompt[:, :64])
    started = time.perf_counter()
    past = model(prompt, use_cache=True).past_key_values
    prefill = mem_len / (time.perf_counter() - started)
    times = [seconds(lambda: model(token, past_key_values=past)) for _ in range(10)]
    return {"decode": 1e3 * statistics.median(times[2:]), "prefill": prefill}


def measure_llama(spec):
    """llama.cpp with 16-bit keys and values, through its C interface."""
    import ctypes

    import gguf
    import llama_cpp
    import numpy as np

    kind = gguf.GGMLQuantizationType[spec["who"].rpartition(" ")[2].replace("float", "F").upper()]
    mem_len, random = spec["mem_len"], np.random.default_rng(0)
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.gguf")
        write_gguf(path, kind, random)
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = mem_len + 256, 512, 512
    options.n_threads = options.n_threads_batch = spec["threads"]
    context = llama_cpp.llama_init_from_model(model, options)

    def read(ids):
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # a name keeps the array alive during the call
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")

    read(random.integers(0, VOCAB, 64).tolist())
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    prompt = random.integers(0, VOCAB, mem_len).tolist()
    prefill = sum(seconds(lambda at=at: read(prompt[at : at + 512])) for at in range(0, mem_len, 512))
    tokens = random.integers(0, VOCAB, WARMUP + TOKENS).tolist()
    times = [seconds(lambda token=token: read([token])) for token in tokens]
    return {"decode": 1e3 * statistics.median(times[WARMUP:]), "prefill": mem_len / prefill}


def write_gguf(path, kind, random):
    """Writes a model of random weights in the architecture "llama" with matrices of a type."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(GATED_FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    attention = {f"attn_{name}": (DIM, DIM) for name in ("q", "k", "v", "output")}
    feedforward = {"ffn_gate": (GATED_FFN, DIM), "ffn_up": (GATED_FFN, DIM), "ffn_down": (DIM, GATED_FFN)}
    norms = {"attn_norm": (DIM,), "ffn_norm": (DIM,)}
    shapes = {"token_embd": (VOCAB, DIM), "output": (VOCAB, DIM), "output_norm": (DIM,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (attention | feedforward | norms).items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        values = (random.standard_normal(shape) * 0.02).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(call):
    """Duration of a call in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(spec):
    """One measurement in this process."""
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if spec["who"] == "versions":
        return {name: version(name) for name in ("torch", "transformers", "llama-cpp-python")}
    if spec["who"].startswith("llama.cpp"):
        return measure_llama(spec)
    import torch

    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    if spec["who"] in OURS:
        return measure_ours(spec)
    with torch.inference_mode():
        return measure_gpt2(spec) if spec["who"].endswith("GPT-2") else measure_transformer_xl(spec)


def ask(options, who, mem_len=0):
    """One measurement in its own process."""
    spec = {"who": who, "mem_len": mem_len, "threads": options.threads}
    python = sys.executable if who in OURS else options.peers
    threads = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [python, __file__, "--one", json.dumps(spec)], capture_output=True, text=True, check=False, env=threads
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        return {"failed": f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(answers[-1])


def medians(rounds):
    """Median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures if name != "failed")
    return {name: round(statistics.median([f[name] for f in rounds if name in f]), 3) for name in names}


def tables(entrants):
    """The three tables as text, a line for each entrant and a column for each memory length."""
    lengths = sorted({int(length) for rows in entrants.values() for length in rows})
    width = max(map(len, entrants))
    names = dict.fromkeys(name for rows in entrants.values() for figures in rows.values() for name in figures)
    for name in names:
        unit = "ms per token" if name == "decode" else "tokens per second"
        print(f"\n{name}, {unit}\n{'':{width}}" + "".join(f"{length:>9,}" for length in lengths))
        for who, rows in entrants.items():
            values = [rows.get(str(length), {}).get(name) for length in lengths]
            if any(value is not None for value in values):
                cells = "".join(f"{'' if v is None else f'{v:,.2f}' if v < 100 else f'{v:,.0f}':>9}" for v in values)
                print(f"{who:{width}}{cells}")


def arguments():
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of an environment that has the peers")
    parser.add_argument("--mem-lens", type=int, nargs="+", default=[512, 2100, 3800])
    parser.add_argument("--entrants", nargs="+", choices=(*OURS, *PEERS), metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {RESULT.name}")
    return parser.parse_args()


def main():
    options = arguments()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    from runs import machine

    words = [word.replace(options.peers or "PYTHON", "PYTHON") for word in sys.argv[1:]]
    about = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "benchmarks/inference.py " + " ".join(words),
        "threads": options.threads,
        "rounds": options.rounds,
    }
    if options.peers:
        about["peers"] = ask(options, "versions")
    whole = json.loads(RESULT.read_text()) if options.write and RESULT.exists() else {"entrants": {}}
    entrants = whole["entrants"]
    chosen = options.entrants or (*OURS, *(PEERS if options.peers else ()))
    for mem_len in options.mem_lens:
        whole["runs"] = whole.get("runs", {}) | {str(mem_len): about}
        rounds = {who: [] for who in chosen}
        for turn in range(options.rounds):
            for who, found in rounds.items():
                found.append(ask(options, who, mem_len))
                print(f"  memory {mem_len}, turn {turn + 1}, {who}: {json.dumps(found[-1])}", flush=True)
                entrants.setdefault(who, {})[str(mem_len)] = medians(found)
                if options.write:
                    RESULT.write_text(json.dumps(whole, indent=2) + "\n")
    tables(entrants)


if __name__ == "__main__":
    main()
