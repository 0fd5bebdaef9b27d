"""Speed and RAM of generation with imported models, in xlcli and in the programs that they come from.

    python benchmarks/imported.py --peers PYTHON [--gguf FILE] [--folder FOLDER] [--entrants NAME ...] [--write]

Two models with random weights are written in the formats of other programs, imported by xlcli, and generate in both:

    txl      Transformer-XL of 12 layers and width 512 (8 heads, feed-forward 2,048, 256 symbols), as transformers
             4.35.2 saves it, with full memory of 1,600 tokens
    smollm   the shape of SmolLM2-135M (Llama: 30 layers, width 576, 9 heads, 3 of keys and values, feed-forward 1,536,
             49,152 symbols, tied), after 512, 2,048 and 4,096 tokens; in llama.cpp and ik_llama.cpp as a GGUF file in
             q8_0, with 16-bit keys and values and flash attention, in llama.cpp also without; with `--gguf FILE` this
             file in its place

PYTHON is the interpreter of an environment with the peers; without it they are left out:

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0 transformers==4.35.2 llama-cpp-python gguf safetensors
    peers/bin/pip install ik-llama-cpp-python==0.1.5

Each measurement runs in its own process, the entrants in turn, `--rounds` times; the median of the rounds counts. A
figure is the median of the milliseconds of single tokens; RAM is the peak of the process, with the reading of the
prompt. Compare the figures of one run only; run it on an idle machine. FOLDER keeps the models for the next run
(1.6 GB).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "imported.json"
TXL = {
    "vocab_size": 256, "cutoffs": [], "d_model": 512, "d_embed": 512, "n_head": 8, "d_head": 64, "d_inner": 2048,
    "n_layer": 12, "mem_len": 1600, "clamp_len": -1, "same_length": True, "adaptive": False, "div_val": 1,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
LENGTHS = {"txl": (1600,), "smollm": (512, 2048, 4096)}
"""Tokens in memory."""
OURS = {
    "xlcli, Transformer-XL": {"model": "txl"},
    "xlcli, Transformer-XL, int8 weights, 16-bit memory": {
        "model": "txl", "weight_dtype": "int8", "memory_dtype": "bfloat16",
    },
    "xlcli, Llama": {"model": "smollm"},
    "xlcli, Llama, int8 weights": {"model": "smollm", "weight_dtype": "int8"},
    "xlcli, Llama, int8 weights, 16-bit memory": {
        "model": "smollm", "weight_dtype": "int8", "memory_dtype": "bfloat16",
    },
    "xlcli, Llama, int8 weights, int8 memory": {"model": "smollm", "weight_dtype": "int8", "memory_dtype": "int8"},
}  # fmt: skip
"""Our entrants: model and number types of weights and memory, float32 if not given."""
PEERS = {
    "transformers 4.35.2, Transformer-XL": {"model": "txl"},
    "ik_llama.cpp, q8_0": {"model": "smollm"},
    "llama.cpp, q8_0": {"model": "smollm", "flash_attention": True},
    "llama.cpp, q8_0, without flash attention": {"model": "smollm", "flash_attention": False},
}
PACKAGES = "torch", "transformers", "llama-cpp-python", "ik-llama-cpp-python"
"""Packages of the peers whose versions are kept."""
TOKENS, WARMUP = 60, 8
"""Timed and untimed tokens."""
SLOW_TOKENS = 12
"""Timed tokens of transformers."""


def write_transformer_xl(folder):
    """Writes the Transformer-XL; runs among the peers."""
    import torch
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    torch.manual_seed(0)
    TransfoXLLMHeadModel(TransfoXLConfig(**TXL)).save_pretrained(folder)


def write_llama(folder):
    """Writes the Llama with random weights."""
    import numpy as np
    from safetensors.numpy import save_file

    dim, ffn, keys = LLAMA["hidden_size"], LLAMA["intermediate_size"], 64 * LLAMA["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (LLAMA["vocab_size"], dim), "model.norm.weight": (dim,)}
    attention = {"q_proj": (dim, dim), "k_proj": (keys, dim), "v_proj": (keys, dim), "o_proj": (dim, dim)}
    feedforward = {"gate_proj": (ffn, dim), "up_proj": (ffn, dim), "down_proj": (dim, ffn)}
    for i in range(LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}mlp.{name}.weight": shape for name, shape in feedforward.items()}
        shapes |= {f"{layer}{name}.weight": (dim,) for name in ("input_layernorm", "post_attention_layernorm")}
    random = np.random.default_rng(0)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else 0.03 * random.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))


def write_gguf(source, path):
    """Writes the Llama for llama.cpp in q8_0; runs among the peers."""
    import gguf
    from safetensors.numpy import load_file

    kind, writer = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(LLAMA["hidden_size"])
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_feed_forward_length(LLAMA["intermediate_size"])
    writer.add_head_count(LLAMA["num_attention_heads"])
    writer.add_head_count_kv(LLAMA["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(LLAMA["rms_norm_eps"])
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(LLAMA["rope_theta"])
    writer.add_vocab_size(LLAMA["vocab_size"])
    writer.add_tokenizer_model("none")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for own, values in load_file(source / "model.safetensors").items():
        name, matrix = own, values
        for theirs, there in names.items():
            name = name.replace(theirs, there)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # rotates pairs of neighbours, not of halves
            rows, columns = matrix.shape
            matrix = matrix.reshape(rows // 64, 2, 32, columns).swapaxes(1, 2).reshape(rows, columns)
        if matrix.ndim == 1:
            writer.add_tensor(name, matrix)
        else:
            writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def import_models(folder):
    """Imports what is there, with the weights as they are."""
    from xlcli.interchange import import_model

    for name in LENGTHS:
        source = folder / name if (folder / name).exists() else folder / f"{name}.gguf"
        if source.exists() and not (folder / f"{name}-imported").exists():
            import_model(source, folder / f"{name}-imported")


def measure_ours(spec):
    """One of our models, in a session as `xlcli generate` uses it."""
    import numpy as np

    from xlcli.config import GenerateConfig, RuntimeConfig, validate
    from xlcli.inference import InferenceSession
    from xlcli.runtime import make_runtime
    from xlcli.store.folder import load

    own = OURS[spec["who"]]
    types = {name: value for name, value in own.items() if name != "model"}
    options = validate(GenerateConfig, {"mem_len": spec["length"], **types})
    runtime = make_runtime(validate(RuntimeConfig, {"device": "cpu", "dtype": "float32", "threads": spec["threads"]}))
    model = load(Path(spec["folder"]) / f"{own['model']}-imported", options)
    session = InferenceSession.open(model, runtime, options, None)
    random, vocab = np.random.default_rng(0), model.tokenizer.vocab_size
    prefill = seconds(lambda: session.read(random.integers(0, vocab, spec["length"]), lambda: False))
    times = []
    for token in random.integers(0, vocab, WARMUP + TOKENS):
        session.last_tokens = [int(token)]
        times.append(seconds(session.predict))
    return {"decode": 1e3 * statistics.median(times[WARMUP:]), "prefill": spec["length"] / prefill}


def measure_transformer_xl(spec):
    """Transformer-XL of transformers, whose memory is the inputs of the layers."""
    import torch
    from transformers import TransfoXLLMHeadModel

    torch.set_num_threads(spec["threads"])
    model = TransfoXLLMHeadModel.from_pretrained(Path(spec["folder"]) / "txl").eval()
    tokens = torch.randint(0, TXL["vocab_size"], (1, spec["length"]))
    with torch.inference_mode():
        started = time.perf_counter()
        memory = None
        for part in tokens.split(128, dim=1):
            memory = model(part, mems=memory, return_dict=True).mems
        prefill = spec["length"] / (time.perf_counter() - started)
        times = [seconds(lambda i=i: model(tokens[:, i : i + 1], mems=memory)) for i in range(2 + SLOW_TOKENS)]
    return {"decode": 1e3 * statistics.median(times[2:]), "prefill": prefill}


def model_and_options(library, spec):
    """The model and the options of its context, by the C interface of llama.cpp or of ik_llama.cpp."""
    path = str(Path(spec["folder"]) / "smollm.gguf").encode()
    model = library.llama_model_load_from_file(path, library.llama_model_default_params())
    options = library.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = spec["length"] + 256, 512, 512
    options.n_threads = options.n_threads_batch = spec["threads"]
    return model, options


def measure_llama(spec):
    """llama.cpp through its C interface."""
    import ctypes

    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model, options = model_and_options(llama_cpp, spec)
    options.flash_attn_type = int(PEERS[spec["who"]]["flash_attention"])
    context = llama_cpp.llama_init_from_model(model, options)

    def read(ids):
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # a name keeps the array alive during the call
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")

    return figures_of(read, spec["length"])


def measure_ik_llama(spec):
    """ik_llama.cpp through its C interface, with flash attention, which its Python class switches off on most CPUs."""
    from ik_llama_cpp import _ctypes_api as ik

    ik.llama_backend_init()
    model, options = model_and_options(ik, spec)
    options.flash_attn = True
    context = ik.llama_init_from_model(model, options)
    n_read = 0

    def read(ids):
        nonlocal n_read
        tokens = (ik.llama_token * len(ids))(*ids)
        batch = ik.llama_batch(n_tokens=len(ids), token=tokens, all_pos_0=n_read, all_pos_1=1)
        if ik.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        n_read += len(ids)

    return figures_of(read, spec["length"])


def figures_of(read, length):
    """Figures of a program that reads tokens: a prompt of this length, then one token at a time."""
    import numpy as np

    random = np.random.default_rng(0)
    prompt = random.integers(0, LLAMA["vocab_size"], length).tolist()
    prefill = sum(seconds(lambda at=at: read(prompt[at : at + 512])) for at in range(0, len(prompt), 512))
    tokens = random.integers(0, LLAMA["vocab_size"], WARMUP + TOKENS).tolist()
    times = [seconds(lambda token=token: read([token])) for token in tokens]
    return {"decode": 1e3 * statistics.median(times[WARMUP:]), "prefill": len(prompt) / prefill}


def seconds(call):
    """Duration of a call in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def answer(spec):
    """What a process of one task prints."""
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    folder = Path(spec["folder"])
    tasks = {
        "versions": lambda: {name: version(name) for name in PACKAGES},
        "txl": lambda: write_transformer_xl(folder / "txl"),
        "gguf": lambda: write_gguf(folder / "smollm", folder / "smollm.gguf"),
        "import": lambda: import_models(folder),
    }
    if spec["who"] in tasks:
        return tasks[spec["who"]]() or {}
    measures = {"xlcli": measure_ours, "ik_llama.cpp": measure_ik_llama, "llama.cpp": measure_llama}
    program = spec["who"].partition(",")[0]
    found = measures.get(program, measure_transformer_xl)(spec)
    return found | {"ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def ask(options, who, length=0):
    """Runs one task in its own process."""
    spec = {"who": who, "length": length, "threads": options.threads, "folder": str(options.folder)}
    python = sys.executable if who in OURS or who == "import" else options.peers
    threads = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [python, __file__, "--one", json.dumps(spec)], capture_output=True, text=True, check=False, env=threads
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        return {"failed": f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(answers[-1])


def make_models(options):
    """Writes and imports the models that are not there; stops the program where that fails."""
    folder = options.folder
    if options.gguf and not (folder / "smollm.gguf").exists():
        (folder / "smollm.gguf").symlink_to(options.gguf.resolve())
    elif not options.gguf and not (folder / "smollm").exists():
        write_llama(folder / "smollm")
    if options.peers and not options.gguf:
        for who, path in (("txl", folder / "txl"), ("gguf", folder / "smollm.gguf")):
            if not path.exists() and "failed" in (made := ask(options, who)):
                sys.exit(f"{who}: {made['failed']}")
    if "failed" in (made := ask(options, "import")):
        sys.exit(f"import: {made['failed']}")


def medians(rounds):
    """Median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures if name != "failed")
    return {name: round(statistics.median([f[name] for f in rounds if name in f]), 3) for name in names}


def arguments():
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of an environment that has the peers")
    parser.add_argument("--gguf", type=Path, help="a Llama to be measured in place of random weights")
    parser.add_argument("--folder", type=Path, help="folder of the models (default: a temporary one)")
    parser.add_argument("--entrants", nargs="+", choices=(*OURS, *PEERS), metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {RESULT.name}")
    return parser.parse_args()


def compare(options):
    """Measures all entrants in turn and prints a line for each."""
    from runs import machine

    make_models(options)
    private = {str(options.peers): "PYTHON", str(options.folder): "FOLDER"}
    about = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "benchmarks/imported.py " + " ".join(private.get(word, word) for word in sys.argv[1:]),
        "threads": options.threads,
        "rounds": options.rounds,
    }
    if options.peers:
        about["peers"] = ask(options, "versions")
    entrants = {}
    chosen = options.entrants or (*OURS, *(PEERS if options.peers else ()))
    runs = [(who, length) for who in chosen for length in LENGTHS[(OURS | PEERS)[who]["model"]]]
    rounds = {run: [] for run in runs}
    for turn in range(options.rounds):
        for (who, length), found in rounds.items():
            found.append(ask(options, who, length))
            print(f"  turn {turn + 1}, {who}, memory {length:,}: {json.dumps(found[-1])}", flush=True)
            entrants.setdefault(who, {})[str(length)] = medians(found)
    if options.write:
        RESULT.write_text(json.dumps({"about": about, "entrants": entrants}, indent=2) + "\n")
    width = max(map(len, chosen))
    print(f"\n{'':{width}}  memory  ms per token  prompt, tokens/s  RAM, MB")
    for who, length in runs:
        f = entrants[who][str(length)]
        if f:
            print(f"{who:{width}}{length:>8,}{f['decode']:>14.2f}{f['prefill']:>18,.0f}{f['ram']:>9,.0f}")


def main():
    """Answers one task, or compares all entrants."""
    options = arguments()
    if options.one:
        print(json.dumps(answer(options.one)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        compare(options)


if __name__ == "__main__":
    main()
