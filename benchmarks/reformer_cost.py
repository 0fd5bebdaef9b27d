"""Cost of a Reformer in xlcli and in two PyTorch ports: memory by depth, length, speed, long memories.

    python benchmarks/reformer_cost.py memory   [--peers PYTHON] [--write]   # peak of a training step by depth
    python benchmarks/reformer_cost.py length   [--write]                    # a training step by tokens
    python benchmarks/reformer_cost.py forward  [--peers PYTHON] [--write]   # one pass without gradients
    python benchmarks/reformer_cost.py generate [--write]                    # a generated token after a long memory

The ports are those of Hugging Face and of lucidrains. PYTHON is the interpreter of an environment with the ports;
without it they are left out:

    python3 -m venv peers && peers/bin/pip install torch transformers==4.35.2 reformer-pytorch

All models have the same width, heads, depth, vocabulary, feed-forward branch (ReLU), axial positions, AdamW, float32,
number of threads, and no dropout; weights and tokens are random, the batch size is 1, lengths are multiples of 512.
Every measurement runs in its own process. Linux only, on an idle machine.

Memory: `peak` is the peak resident memory during the steps, and `above` its increase over the value before them, which
contains AdamW state (8 bytes per parameter), activations, and gradients (4 bytes per parameter) unless they are
allocated already. `tensors` is the peak size of the tensors allocated in one more step, independent of the C library;
`activations` is `tensors` without the gradients that a port allocates in every step, some of which may come after the
peak.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "reformer_cost.json"
CHUNK = 512
"""Chunk length of feed-forward branch and loss, in tokens."""
WINDOW = 64
"""Window of local attention, chunk length of the ports, and second axis of the axial positions."""
MINUTE = {"n_layers": 1, "tokens": CHUNK}
"""Shape of a model that is trained first, so that libraries are loaded."""
ENTRANTS = {
    "memory": ("reversible, hashed", "reversible, local", "standard, hashed", "standard, full"),
    "forward": ("reversible, hashed", "reversible, local and hashed"),
}
PORTS = {
    "memory": ("hf-reformer, hashed", "reformer-pytorch, hashed"),
    "forward": ("hf-reformer, hashed", "hf-reformer, local and hashed", "reformer-pytorch, hashed"),
}


def our_settings(spec):
    """Configuration of one of our models; `ConfigError` where it is not possible."""
    from xlcli import config

    stack, attention = spec["who"].split(", ")
    chunked = CHUNK if stack == "reversible" else None
    axial = {"kind": "axial", "shape": [-(-spec["tokens"] // WINDOW), WINDOW]}
    hashed = {"kind": "lsh"} | {name: spec[name] for name in ("n_buckets", "bucket_size", "n_hashes")}
    local = {"kind": "local", "window": WINDOW}
    mixed = {"kind": "mixed", "layers": [local, hashed]}
    attentions = {"hashed": hashed, "local": local, "local and hashed": mixed, "full": {"kind": "full"}}
    model = {
        "vocab_size": spec["vocab"], "dim": spec["dim"], "n_layers": spec["n_layers"], "stack": {"kind": stack},
        "attention": attentions[attention] | {"n_heads": spec["heads"]},
        "position": {"kind": "xl"} if attention == "full" else axial,
        "feedforward": {"kind": "relu", "ffn_dim": spec["ffn"], "chunk_len": chunked}, "loss_chunk": chunked,
        "norm": {"kind": "layer", "placement": "pre"}, "bias": True,
    }  # fmt: skip
    train = {
        "segment_len": spec["tokens"], "mem_len": 0, "batch_size": 1, "optimizer": "adamw", "lr": 1e-3, "max_steps": 9,
    }  # fmt: skip
    runtime = {"dtype": "float32", "device": "cpu", "threads": spec["threads"]}
    return config.make({"model": model, "train": train, "runtime": runtime})


def port(spec):
    """Model of a port, and its function from tokens (b t) to logits (b t v)."""
    name, attention = spec["who"].split(", ")
    tokens, dim, heads, depth = spec["tokens"], spec["dim"], spec["heads"], spec["n_layers"]
    if name == "reformer-pytorch":
        from reformer_pytorch import ReformerLM
        from torch import nn

        model = ReformerLM(
            num_tokens=spec["vocab"], dim=dim, depth=depth, max_seq_len=tokens, heads=heads, dim_head=dim // heads,
            bucket_size=spec["bucket_size"], n_hashes=spec["n_hashes"], ff_chunks=-(-tokens // CHUNK),
            ff_mult=spec["ffn"] // dim, ff_activation=nn.ReLU, causal=True, axial_position_emb=True,
            axial_position_shape=(tokens // WINDOW, WINDOW),
        )  # fmt: skip
        return model, model
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import ReformerConfig, ReformerModelWithLMHead

    kinds = ["lsh"] if attention == "hashed" else ["local", "lsh"]
    settings = ReformerConfig(
        attn_layers=[kinds[i % len(kinds)] for i in range(depth)], hidden_size=dim, num_attention_heads=heads,
        attention_head_size=dim // heads, feed_forward_size=spec["ffn"], vocab_size=spec["vocab"], is_decoder=True,
        num_hashes=spec["n_hashes"], lsh_attn_chunk_length=spec["bucket_size"], local_attn_chunk_length=WINDOW,
        max_position_embeddings=tokens, axial_pos_shape=(tokens // WINDOW, WINDOW),
        axial_pos_embds_dim=(dim // 4, dim - dim // 4), chunk_size_feed_forward=CHUNK, chunk_size_lm_head=CHUNK,
        hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0, hidden_act="relu",
    )  # fmt: skip
    model = ReformerModelWithLMHead(settings)
    # By default it keeps the inputs of every layer for generation, even during training.
    return model, lambda x: model(x, use_cache=False).logits


def trainer(spec):
    """Function that takes a training step, number of parameters, and bytes of gradients allocated in each step."""
    import numpy as np
    import torch

    if not is_port(spec):
        from xlcli.runtime import make_runtime
        from xlcli.text.tokens import TokenFile
        from xlcli.training.run import TrainingRun

        settings = our_settings(spec)
        ids = np.random.default_rng(0).integers(0, spec["vocab"], 4 * spec["tokens"]).astype(np.uint16)
        run = TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 0)
        return lambda: run.train_step(0.5), run.model.n_parameters, 0
    model, logits = port(spec)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(1, spec["vocab"], (1, spec["tokens"] + 1))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits(ids[:, :-1]).mT, ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    parameters = sum(p.numel() for p in model.parameters())
    return step, parameters, 4 * parameters


def forget_peak():
    """Resets the peak of resident memory; returns the current resident memory in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak():
    """Peak of resident memory in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def asked_for(call):
    """Peak size in bytes of the tensors allocated during a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def seconds(call):
    """Seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_training(spec):
    """Peak memory of training steps, and their speed or size of tensors."""
    trainer(spec | MINUTE)[0]()
    step, parameters, gradients = trainer(spec)
    before = forget_peak()
    times = [seconds(step) for _ in range(spec["steps"])]
    found = {"peak": peak(), "above": peak() - before, "parameters": parameters}
    if spec["question"] == "memory":
        tensors = asked_for(step)
        return found | {"tensors": tensors, "activations": tensors - gradients}
    return {"tokens_per_second": round(spec["tokens"] / statistics.median(times[spec["warm"] :]), 1)} | found


def measure_forward(spec):
    """Seconds of forward passes to the loss of every token, and the number of parameters."""
    import torch

    ids = torch.randint(1, spec["vocab"], (1, spec["tokens"] + 1))
    x, y = ids[:, :-1], ids[:, 1:]
    if is_port(spec):
        model, logits = port(spec)

        def read():
            torch.nn.functional.cross_entropy(logits(x).mT, y, reduction="none")

    else:
        from xlcli.model.build import build_model

        model = build_model(our_settings(spec).model)
        state = model.init_state(1, mem_len=0, segment_len=spec["tokens"])

        def read():
            model.score(x, y, state)[:2]

    model.eval()
    with torch.inference_mode():
        read()
        times = [seconds(read) for _ in range(2)]
    return {"seconds": times, "parameters": sum(p.numel() for p in model.parameters())}


def measure_generation(spec):
    """Milliseconds of a call of one token with full memory, and the time to fill it."""
    import torch

    from xlcli.model.build import build_model

    model = build_model(our_settings(spec).model).eval()
    mem_len, call = spec["mem_len"], spec["call"]
    with torch.inference_mode():
        state = model.init_state(1, mem_len=mem_len, segment_len=call)
        started = time.perf_counter()
        for at in range(0, mem_len, call):
            _, state = model.logits(torch.randint(spec["vocab"], (1, min(call, mem_len - at))), state)
        filled = time.perf_counter() - started
        times = []
        for token in torch.randint(spec["vocab"], (spec["steps"] + 10, 1, 1)):
            started = time.perf_counter()
            _, state = model.logits(token, state)
            times.append(time.perf_counter() - started)
    found = {"ms_per_token": round(1e3 * statistics.median(times[10:]), 4), "memory_bytes": state.bytes, "peak": peak()}
    return found | {"read_tokens_per_second": round(mem_len / filled, 1)}


def measure(spec):
    """One measurement in this process."""
    if spec["question"] == "versions":
        return {name: version(name) for name in ("torch", "transformers", "reformer-pytorch")}
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    measures = {"forward": measure_forward, "generate": measure_generation}
    return measures.get(spec["question"], measure_training)(spec)


def is_port(spec):
    """Whether the measurement runs in the environment of the ports."""
    return spec["who"].startswith(("hf-reformer", "reformer-pytorch"))


def ask(options, **more):
    """One measurement in its own process."""
    spec = {name: value for name, value in vars(options).items() if name not in ("peers", "write")} | {"who": ""} | more
    python = options.peers if is_port(spec) or spec["question"] == "versions" else sys.executable
    command = [python, __file__, "one", json.dumps(spec)]
    threads = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=threads)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        error = f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        return {"skipped" if "ConfigError" in error else "failed": error}
    return json.loads(answers[-1])


def series(options, keep, who, key, values, *, ratios, **more):
    """Measurements of one model for each value of one number, and the ratio of the last to the first."""
    rows = {}
    for value in sorted(values):
        rows[value] = ask(options, who=who, **{key: value} | {name: rule(value) for name, rule in more.items()})
        print(f"  {who}, {key} {value}: {json.dumps(rows[value])}", flush=True)
        keep(who, rows)
    first, last = rows[min(values)], rows[max(values)]
    shared = first.keys() & last.keys()
    keep(who, rows | {"last to first": {name: round(last[name] / first[name], 3) for name in ratios if name in shared}})


def memory(options, keep):
    """All models at all depths."""
    for who in (*ENTRANTS["memory"], *(PORTS["memory"] if options.peers else ())):
        ratios = ("peak", "above", "tensors", "activations")
        series(options, keep, who, "n_layers", options.layers, ratios=ratios, steps=lambda _: 2)


def length(options, keep):
    """Our models at all lengths, with a warm-up step where that is cheap."""
    rules = {"steps": lambda t: max(2, min(10, 2**16 // t)), "warm": lambda t: int(t < 2**16)}
    ratios = ("tokens_per_second", "peak", "above")
    series(options, keep, "reversible, hashed", "tokens", options.lengths, ratios=ratios, **rules)


def forward(options, keep):
    """All models in turn; ours also with the number of buckets that the ports choose."""
    names = (*ENTRANTS["forward"], *(PORTS["forward"] if options.peers else ()))
    entrants = {who: {"who": who} for who in names}
    many = options.tokens // options.bucket_size
    entrants[f"{names[0]}, {many} buckets"] = {"who": names[0], "n_buckets": many}
    times = {name: [] for name in entrants}
    for turn in range(options.rounds):
        for name, spec in entrants.items():
            found = ask(options, **spec)
            times[name] += found.pop("seconds", ())
            if times[name]:
                found["tokens_per_second"] = round(options.tokens / statistics.median(times[name]), 1)
                found["seconds"] = [round(t, 4) for t in times[name]]
            print(f"  turn {turn + 1}, {name}: {json.dumps(found)}", flush=True)
            keep(name, found)


def generation(options, keep):
    """Our model with all memory lengths, and full attention with the shortest."""
    same, ratios = {"tokens": int}, ("ms_per_token", "memory_bytes")
    series(options, keep, "reversible, hashed", "mem_len", options.mem_lens, ratios=ratios, **same)
    series(options, keep, "standard, full", "mem_len", [min(options.mem_lens)], ratios=(), **same)


OPTIONS = {
    "memory": {"tokens": 4096, "layers": [2, 4, 8, 12], "bucket_size": 32, "n_hashes": 2},
    "length": {"lengths": [1024, 4096, 16384, 65536], "n_layers": 6, "bucket_size": 32, "n_hashes": 4},
    "forward": {"tokens": 16384, "n_layers": 6, "bucket_size": 64, "n_hashes": 4, "rounds": 3},
    "generate": {
        "mem_lens": [4096, 1_000_000], "n_layers": 6, "bucket_size": 32, "n_hashes": 4, "steps": 100, "call": 4096,
    },
}  # fmt: skip
"""Options of each measurement, in addition to the common ones."""


def arguments():
    """Argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    questions = parser.add_subparsers(dest="question", required=True)
    questions.add_parser("one").add_argument("spec", type=json.loads)
    numbers = {"threads": 2, "dim": 256, "heads": 4, "ffn": 1024, "vocab": 256, "n_buckets": 64}
    for question, own in OPTIONS.items():
        command = questions.add_parser(question)
        command.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
        command.add_argument("--peers", metavar="PYTHON", help="interpreter of an environment that has the ports")
        for name, value in (numbers | own).items():
            many = {"nargs": "+"} if isinstance(value, list) else {}
            flag = f"--{name.replace('_', '-')}"
            command.add_argument(flag, type=int, default=value, help=f"default: {value}", **many)
    return parser.parse_args()


def main():
    options = arguments()
    if options.question == "one":
        print(json.dumps(measure(options.spec)))
        return
    from runs import machine

    words = [word.replace(options.peers or "PYTHON", "PYTHON") for word in sys.argv[1:]]
    result = {"machine": machine(), "command": "benchmarks/reformer_cost.py " + " ".join(words)}
    if options.peers:
        result["peers"] = ask(options, question="versions")
    result["options"] = {name: value for name, value in vars(options).items() if name not in ("peers", "write")}
    result["entrants"] = {}

    def keep(who, figures):
        result["entrants"][who] = figures
        if options.write:
            RESULT.parent.mkdir(exist_ok=True)
            whole = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            RESULT.write_text(json.dumps(whole | {options.question: result}, indent=2) + "\n")

    {"memory": memory, "length": length, "forward": forward, "generate": generation}[options.question](options, keep)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
