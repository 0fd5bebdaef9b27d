"""Everything that a checkout computes, to compare two checkouts to the bit, or one with a recording of another.

    python tests/golden/compare_checkouts.py record OUT.json [--checkout FOLDER] [--only PATTERN]
    python tests/golden/compare_checkouts.py compare OLD NEW [--only PATTERN] [--ignore PATTERN]
    python tests/golden/compare_checkouts.py time OLD NEW [--rounds 7] [--seconds 3]
    python tests/golden/compare_checkouts.py list

`record` continues a recording that exists. OLD and NEW are checkouts or recordings; `compare` prints every difference
with its size, and ends with exit code 1 if there is any. A recording is of one machine: another processor rounds
otherwise. Each command runs in a process of its own, as `PYTHONPATH=CHECKOUT python -P -m xlcli` does. To import torch
only once, these processes are forked from one that has imported other packages but nothing of xlcli; `--fresh` starts
an interpreter for each. `--python` and `--new-python` are the interpreters of checkouts; default: that of this script.

Patterns are regular expressions. `--only` selects cases; a case that needs a trained model trains it. `--ignore` leaves
out results by their path, for instance `/file$`, the hash of a whole file, which also changes with the names of
settings, while those of its tensors remain. Times, speeds, sizes of processes, versions and paths are never
recorded. Options or results with another name in one checkout have a line in `WORDS` or `RESULTS`.

`time` runs `xlcli bench decode|eval|train --json` of both checkouts in turn and prints medians; use an idle machine.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]

WORDS: dict[str, dict[str, str]] = {"old": {}, "new": {}}
"""For each side, words of the tables that it writes otherwise: `{"--n-hashes": "--rounds"}`; "" leaves one out."""
RESULTS: dict[str, str] = {}
"""Keys of results that have another name in the new checkout: new name to old name."""

SMALL = (
    "--preset tiny --tokenizer bytes --segment-len 16 --mem-len 24 --batch-size 2 runtime.dtype=float32 "
    "model.dim=16 model.feedforward.ffn_dim=24"
)
"""Shape of the trained models; a word with `=` is a key of the configuration (`--set`), `.key=` one of the command."""
RUN = "--max-steps 6 train.eval_every=3 train.save_every=3 --seed 0 --threads 1"
"""Budget of the trained models."""

BUCKETS = "model.position.n_buckets=6 model.position.max_distance=20"
LSH = "model.attention.kind=lsh model.attention.n_buckets=8 model.attention.bucket_size=4 model.position.kind=rope"
LINEAR = "model.attention.kind=linear model.attention.n_features=12 model.position.kind=rope"
LOCAL = "model.attention.kind=local model.attention.window=7"
UNIVERSAL = "model.stack.kind=universal model.stack.n_steps=3"
ACT = f"{UNIVERSAL} model.stack.act=true model.stack.halt_bias=0.0"
HASHED_LAYER = '{kind="lsh",n_buckets=4,bucket_size=6}'
LOCAL_LAYER = '{kind="local",window=7}'
DROPOUT = " ".join(f"model.dropout.{part}=0.2" for part in ("embedding", "residual", "feedforward"))

FULLY: dict[str, str] = {
    "position xl": "",
    "position xl, clamped": "model.position.clamp_len=9 model.position.tied=true",
    "position none": "model.position.kind=none",
    "position sinusoidal": "model.position.kind=sinusoidal",
    "position learned": "model.position.kind=learned model.position.max_len=100",
    "position axial": "model.position.kind=axial model.position.shape=[5,20]",
    "position rope": "model.position.kind=rope",
    "position alibi": "model.position.kind=alibi",
    "position t5": f"model.position.kind=t5 {BUCKETS}",
    "position shaw": "model.position.kind=shaw model.position.max_distance=9",
    "position contextual-1": f"model.position.kind=contextual-1 {BUCKETS}",
    "position contextual-2": f"model.position.kind=contextual-2 {BUCKETS}",
    "attention local": LOCAL,
    "attention linear": LINEAR,
    "attention linear, redrawn": f"{LINEAR} model.attention.redraw_every=2",
    "attention lsh": LSH,
    "attention lsh, redrawn": f"{LSH} model.attention.redraw_every=2",
    "attention mixed, local and lsh": (
        f"model.attention.kind=mixed model.attention.layers=[{LOCAL_LAYER},{HASHED_LAYER}] model.position.kind=rope"
    ),
    "attention mixed, full and local": f'model.attention.kind=mixed model.attention.layers=["full",{LOCAL_LAYER}]',
    "stack universal": UNIVERSAL,
    "stack act": ACT,
    "stack act, lsh": f"{ACT} {LSH}",
    "stack reversible": "model.stack.kind=reversible",
    "norm sandwich": "model.norm.kind=layer model.norm.placement=sandwich model.feedforward.chunk_len=5",
    "head adaptive": "model.embedding.cutoffs=[40,110] model.embedding.div_val=2 model.loss_chunk=5",
    "head untied, factorized": "model.embedding.inner_dim=6 model.embedding.tied=false",
    "embedding bigrams": "model.embedding.n_bigrams=57 model.embedding.per_layer=true",
    "memory keyvalue": "train.memory=keyvalue",
    "memory none": "--mem-len 0",
    "dropout": f"{DROPOUT} model.dropout.attention=0.2",
    "grad accumulation": "--batch-size 4 train.grad_accum=2",
    "tokenizer sentencepiece": "--tokenizer sentencepiece --vocab-size 300",
    "tokenizer words": "--tokenizer words",
    "optimizer adamw": "train.optimizer=adamw",
    "weights int8": "train.weights=int8",
    "documents": "train.reset_on_document=true",
}
"""Models that every command of `EVAL` and `ALL` runs with, and that are resumed."""

BRIEFLY: dict[str, str] = {
    "position sinusoidal, layers": "model.position.kind=sinusoidal model.position.placement=layers",
    "position sinusoidal, qk": "model.position.kind=sinusoidal model.position.placement=qk",
    "position learned, layers": (
        "model.position.kind=learned model.position.max_len=100 model.position.placement=layers"
    ),
    "position learned, qk": (
        "model.position.kind=learned model.position.max_len=100 model.position.placement=qk model.position.shared=true"
    ),
    "position axial, layers": (
        "model.position.kind=axial model.position.shape=[7,5,5] model.position.dims=[5,4,7] "
        "model.position.placement=layers"
    ),
    "position rope, embedding": "model.position.kind=rope model.position.placement=embedding",
    "position rope, interleaved": (
        "model.position.kind=rope model.position.layout=interleaved model.position.clamp_len=9"
    ),
    "position t5, per layer": f"model.position.kind=t5 {BUCKETS} model.position.shared=false",
    "position contextual-1, shared": f"model.position.kind=contextual-1 {BUCKETS} model.position.shared=true",
    "position contextual-2, shared": f"model.position.kind=contextual-2 {BUCKETS} model.position.shared=true",
    "position xl, features": "model.position.n_features=8",
    "attention full, qk_norm": "model.attention.qk_norm=true",
    "attention full, unscaled": "model.attention.scaled=false",
    "attention full, head_dim": "model.attention.head_dim=6 model.attention.n_heads=3",
    "attention local, rope": f"{LOCAL} model.position.kind=rope model.attention.qk_norm=true",
    "attention local, t5": f"{LOCAL} model.position.kind=t5 {BUCKETS}",
    "attention local, shaw": f"{LOCAL} model.position.kind=shaw model.position.max_distance=5",
    "attention local, learned": f"{LOCAL} model.position.kind=learned model.position.max_len=100",
    "attention local, contextual-2": f"{LOCAL} model.position.kind=contextual-2 {BUCKETS}",
    "attention linear, not orthogonal": f"{LINEAR} model.attention.orthogonal=false",
    "attention linear, learned": f"{LINEAR} model.position.kind=learned",
    "attention lsh, list of buckets": f"{LSH} model.attention.n_buckets=[2,4] model.attention.query_scale=2.0",
    "attention lsh, one bucket": f"{LSH} model.attention.n_buckets=1 model.attention.bucket_size=64",
    "attention lsh, axial": f"{LSH} model.position.kind=axial model.position.shape=[5,20]",
    "attention mixed, full and linear": (
        'model.attention.kind=mixed model.attention.layers=["full",{kind="linear",n_features=16}]'
    ),
    "stack input residual": "model.stack.input_residual=true",
    "stack universal, no time signal": f"{UNIVERSAL} model.stack.time_signal=false",
    "stack act, linear": f"{ACT} {LINEAR}",
    "stack act, local": f"{ACT} {LOCAL}",
    "stack reversible, lsh": f"model.stack.kind=reversible {LSH}",
    "stack reversible, dropout": f"model.stack.kind=reversible {DROPOUT}",
    **{
        f"norm {kind} {placement}": f"model.norm.kind={kind} model.norm.placement={placement}"
        for kind in ("layer", "rms")
        for placement in ("pre", "post", "sandwich", "rezero")
    },
    **{
        f"feedforward {kind}": f"model.feedforward.kind={kind}"
        for kind in ("relu", "gelu", "gelu-tanh", "relu2", "swiglu", "geglu")
    },
    "embedding scaled": "model.embedding.scaled=true",
    "head adaptive, untied": "model.embedding.cutoffs=[40,110] model.embedding.tied=false",
    "head softcap": "model.logit_softcap=8.0",
    "zero init": "model.zero_init=true",
    "bias": "model.bias=true model.init_std=0.05",
    "dropout, local": f"{LOCAL} {DROPOUT} model.dropout.attention=0.2",
    "dropout, lsh": f"{LSH} {DROPOUT} model.dropout.attention=0.2",
    "dropout of the command": "model.dropout=0.1",
    "memory keyvalue, local": f"{LOCAL} train.memory=keyvalue",
    "span uniform": "train.span=uniform",
    "span uniform, keyvalue": "train.span=uniform train.memory=keyvalue model.position.kind=rope",
    "recompute": "train.recompute_activations=true",
    "recompute, dropout": f"train.recompute_activations=true {DROPOUT}",
    "grad accumulation, keyvalue": "--batch-size 4 train.grad_accum=2 train.memory=keyvalue",
    **{
        f"schedule {kind}": f"train.lr_schedule={kind} train.warmup_steps=2"
        for kind in ("cosine", "linear", "wsd", "constant", "inverse_sqrt")
    },
    "schedule wsd, decay": "train.lr_schedule=wsd train.decay_fraction=0.5 train.min_lr_ratio=0.1",
    "optimizer muon, all settings": (
        "--lr 0.01 train.adam_lr=0.003 train.momentum=0.9 train.weight_decay=0.1 train.betas=[0.8,0.9]"
    ),
    "optimizer adamw, no clipping": "train.optimizer=adamw --lr 0.01 train.grad_clip=0.0 train.betas=[0.8,0.9]",
    "optimizer muon, clipping": "train.grad_clip=0.1",
    "budget in tokens": "--max-tokens 160",
    "patience": "--max-steps 30 train.eval_every=1 --patience 1 --lr 0.5",
    "weights bfloat16": "train.weights=bfloat16",
    "dtype bfloat16": "runtime.dtype=bfloat16",
    "dtype bfloat16, local": f"runtime.dtype=bfloat16 {LOCAL}",
    "dtype bfloat16, lsh": f"runtime.dtype=bfloat16 {LSH}",
    "dtype bfloat16, linear": f"runtime.dtype=bfloat16 {LINEAR}",
    "dtype bfloat16, act": f"runtime.dtype=bfloat16 {ACT}",
    "dtype bfloat16, adaptive head": (
        "runtime.dtype=bfloat16 model.embedding.cutoffs=[40,110] model.embedding.div_val=2 model.bias=true"
    ),
    "dtype float16": "runtime.dtype=float16",
    "deterministic": "runtime.deterministic=true",
    "seed 7": "--seed 7",
    "threads 2": "--threads 2 --segment-len 64 --mem-len 64 --batch-size 8 model.dim=64 model.feedforward.ffn_dim=128",
    "threads 2, lsh": f"{LSH} --threads 2 --segment-len 64 --mem-len 64 --batch-size 8 model.dim=64",
    "wide": "--segment-len 64 --mem-len 64 --batch-size 8 model.dim=64 model.feedforward.ffn_dim=128",
    "wide, documents": "train.reset_on_document=true --segment-len 64 --mem-len 64 --batch-size 8 model.dim=64",
    "long segments": "--segment-len 600 --mem-len 300 --batch-size 1",
    "long segments, bfloat16": "--segment-len 600 --mem-len 300 --batch-size 1 runtime.dtype=bfloat16",
    "documents, keyvalue": "train.reset_on_document=true train.memory=keyvalue",
    "documents, local": f"train.reset_on_document=true {LOCAL}",
    "documents, learned": "train.reset_on_document=true model.position.kind=learned model.position.max_len=100",
    "documents, t5": f"train.reset_on_document=true model.position.kind=t5 {BUCKETS}",
    "tokenizer sentencepiece, adaptive": (
        "--tokenizer sentencepiece --vocab-size 300 model.embedding.cutoffs=[50,150] model.embedding.div_val=2"
    ),
    "all at once": (
        "model.norm.kind=layer model.norm.placement=post model.feedforward.kind=relu model.feedforward.chunk_len=4 "
        "model.bias=true model.embedding.scaled=true model.embedding.cutoffs=[9,20] model.embedding.div_val=2 "
        f"{DROPOUT} train.grad_accum=2"
    ),
}
"""Models that only the commands of `EVAL` run with."""

PRESETS = (
    "al-rfou-12l alibi-wt103 base gpt2-small llama-15m llama-7b medium peer-12x512 performer-enwik8 reformer-crime "
    "reformer-enwik8 reformer-small reformer-tiny shaw-base small-alibi small-local small-performer small-rope "
    "small-shaw small-t5 small-universal-act small-universal small-vanilla small t5-small-decoder t5-v11-small-decoder "
    "tiny txl-enwik8-12l txl-enwik8-18l txl-enwik8-24l txl-lm1b-large txl-text8-24l txl-wt103-large-16l "
    "txl-wt103-large txl-wt103-standard universal-act-base universal-base"
)
PRESET_SMALL = (
    "--preset PRESET --tokenizer bytes --segment-len 16 --mem-len 24 --batch-size 2 train.grad_accum=1 model.dim=32 "
    "model.n_layers=2 model.attention.n_heads=4 model.attention.head_dim=8 model.feedforward.ffn_dim=48"
)
"""A preset, made small, in the number type that training chooses."""
OTHER_TOKENIZER = (
    "alibi-wt103 llama-15m llama-7b shaw-base t5-small-decoder t5-v11-small-decoder txl-lm1b-large "
    "txl-wt103-large-16l txl-wt103-large txl-wt103-standard universal-act-base universal-base"
)
"""Presets with a vocabulary size, which is 256 with bytes."""
SMALL_OF_PRESET: dict[str, str] = {
    **dict.fromkeys(OTHER_TOKENIZER.split(), "--vocab-size 256"),
    "al-rfou-12l": "model.position.overflow=wrap",
    "gpt2-small": "--vocab-size 256 model.position.overflow=wrap",
    "reformer-crime": "--vocab-size 256 model.position.shape=[16,16] model.position.dims=[8,24]",
    "reformer-enwik8": "model.position.dims=[8,24]",
}
"""Further settings of small presets."""

EVAL: dict[str, str] = {
    "eval": "eval READ -m MODEL --json --sweep-mem-len 8,40 --threads 1",
    "per token": "eval READ -m MODEL --json --per-token OUT --mem-len 24 --segment-len 50 --threads 1",
}
ALL: dict[str, str] = {
    "stream": "stream READ -m MODEL --json --emit lines --state-out OUT --threads 1",
    "greedy": "generate Before -m MODEL -n 40 -t 0 --seed 1 --threads 1",
    "sampled": "generate Before -m MODEL -n 40 --seed 1 --threads 1",
}
"""Commands with a trained model. READ is a text, OUT a file that is recorded, LAST that of the last command."""

FURTHER: dict[str, tuple[str, ...]] = {
    "adapt": (
        "eval READ -m position,xl --json --adapt --per-token OUT --threads 1",
        "eval READ -m position,rope --json --adapt eval.adapt_weights=blocks eval.adapt_block=7 --threads 1",
        "eval READ -m attention,lsh --json --adapt --threads 1",
        "eval READ -m stack,act --json --adapt eval.adapt_lr=0.01 eval.adapt_decay=0.1 --threads 1",
        "stream READ -m position,xl --json --adapt --state-out OUT --threads 1",
        "stream READ -m position,xl --json --adapt --state-in LAST --state-out OUT --threads 1",
        "generate Before -m position,xl --adapt -n 40 --seed 1 --threads 1",
    ),
    "cache": (
        "eval READ -m position,xl --json --context-cache 500 --per-token OUT --threads 1",
        "eval READ -m tokenizer,sentencepiece --json --context-cache 500 --threads 1",
        "eval READ -m position,xl --json --context-cache 500 --adapt --threads 1",
        "stream READ -m position,xl --json --context-cache 300 --adapt --state-out OUT --threads 1",
        "stream READ -m position,xl --json --context-cache 300 --adapt --state-in LAST --threads 1",
        "generate Before -m position,xl --context-cache 500 -n 40 --seed 1 --threads 1",
    ),
    "rounded memory": tuple(
        f"{command} .memory_dtype={dtype} --threads 1"
        for dtype in ("bfloat16", "int8")
        for command in (
            "eval READ -m position,xl --json --per-token OUT --segment-len 50",
            "eval READ -m attention,local --json",
            "stream READ -m position,rope --json --state-out OUT",
            "generate Before -m position,xl -n 40 -t 0",
            "generate Before -m position,xl -n 40 --seed 1",
        )
    ),
    "rounded weights": tuple(
        f"{command} .weight_dtype={dtype} --threads 1"
        for dtype in ("bfloat16", "int8")
        for command in (
            "eval READ -m position,xl --json --per-token OUT",
            "generate Before -m position,xl -n 40 -t 0",
            "generate Before -m head,adaptive -n 40 -t 0 .memory_dtype=int8",
            "stream READ -m position,t5 --json --state-out OUT",
        )
    ),
    "dtype": (
        "eval READ -m position,xl --json runtime.dtype=bfloat16 --threads 1",
        "eval READ -m position,xl --json runtime.dtype=float16 --threads 1",
        "generate Before -m position,xl -n 40 -t 0 runtime.dtype=bfloat16 --threads 1",
        "stream READ -m position,xl --json runtime.dtype=bfloat16 --state-out OUT --threads 1",
    ),
    "eval": (
        "eval READ -m position,xl --json --mem-len 0 --segment-len 20 .stride=5 --threads 1",
        "eval READ -m position,learned --json --mem-len 0 --segment-len 20 .stride=7 .batch_size=3 --threads 1",
        "eval READ -m position,xl --json --mem-len 0 --segment-len 20 --threads 1",
        "eval READ -m position,xl --json .span=growing --segment-len 20 --threads 1",
        "eval READ -m position,xl --json .batch_size=4 --segment-len 13 --threads 1",
        "eval READ -m attention,local --json .batch_size=4 --threads 1",
        "eval READ -m position,xl --json .clamp_len=9 --threads 1",
        "eval READ -m position,rope --json .clamp_len=none --mem-len 100 --threads 1",
        "eval READ -m attention,lsh --json .n_hashes=8 --threads 1",
        "eval READ -m attention,mixed,,local,and,lsh --json .n_hashes=2 --threads 1",
        "eval READ -m stack,universal --json .n_steps=5 --threads 1",
        "eval READ -m stack,act --json .n_steps=5 --threads 1",
        "eval -m position,xl --json --split test --limit 200 --threads 1",
        "eval -m position,xl --json --split valid --threads 1",
        "eval DOCUMENTS -m position,xl --json --reset-on-document --per-token OUT --threads 1",
        "eval DOCUMENTS -m attention,lsh --json --reset-on-document .batch_size=3 --threads 1",
        "eval DOCUMENTS -m documents --json --threads 1",
        "eval DOCUMENTS -m position,xl --json --text-field title --threads 1",
        "eval READ TEXT -m position,xl --json --limit 900 --threads 1",
        "eval BINARY -m position,xl --json --binary --threads 1",
        "eval READ -m position,xl --json --threads 2",
        "eval READ -m attention,lsh --json --threads 2",
        "eval READ -m position,xl --json .batch_size=4 --threads 2",
    ),
    "stream": (
        "stream READ -m position,xl --json --emit tokens --threads 1",
        "stream READ -m position,xl --json --emit stats --threads 1",
        "stream READ -m position,xl --mem-len 40 --threads 1 -q",
        "stream READ -m position,xl --json --reset-on ^[A-Z]+: --threads 1",
        "stream DOCUMENTS -m documents --json --state-out OUT --threads 1",
        "stream DOCUMENTS -m attention,lsh --json --reset-on-document --threads 1",
        "stream READ -m attention,lsh --json .n_hashes=8 --state-out OUT --threads 1",
        "stream TEXT -m attention,lsh --json --state-in LAST --state-out OUT --threads 1",
        "stream READ -m stack,act --json --state-out OUT --threads 1",
        "stream TEXT -m stack,act --json --state-in LAST --state-out OUT --threads 1",
    ),
    "generate": (
        "generate --prompts PROMPTS -m position,xl -n 20 --seed 1 --threads 1",
        "generate --prompts PROMPTS -m attention,lsh -n 20 -t 0 --logprobs 2 --seed 1 --threads 1",
        "generate --prompts PROMPTS -m tokenizer,sentencepiece -n 20 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --json --logprobs 3 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --json --num-samples 3 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 -k 5 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --top-p 0.7 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --min-p 0.1 -t 1 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --repetition-penalty 1.3 --seed 1 --threads 1",
        "generate Before -m tokenizer,words -n 30 -t 0 --stop the --threads 1",
        "generate Before -m position,xl -n 30 --mem-len 4 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 .clamp_len=5 --seed 1 --threads 1",
        "generate Before -m stack,universal -n 30 .n_steps=5 --seed 1 --threads 1",
        "generate Before -m attention,lsh -n 30 .n_hashes=1 --seed 1 --threads 1",
        "generate Before -m position,xl -n 30 --seed 1 --state-out OUT --threads 1",
        "generate -m position,xl -n 30 --state-in LAST --state-out OUT --threads 1",
        "generate Before -m position,xl -n 30 --seed 1 --threads 2",
        "generate -i -m position,xl -n 10 --seed 1 --threads 1 < PROMPT_LINES",
        "generate TEXT_AS_PROMPT -m attention,mixed,,full,and,local -n 10 --json --logprobs 1 -t 0 "
        "--seed 1 --threads 1",
    ),
    "models": (
        "train TEXT -o MADE --init position,xl --max-steps 3 --seed 0 --threads 1 --batch-size 2",
        "train TEXT -o MADE --init weights,int8 --max-steps 3 --seed 0 --threads 1 --batch-size 2 "
        "runtime.dtype=float32",
        "models copy position,xl MADE --weights int8",
        "models copy position,xl MADE --weights bfloat16",
    ),
    "processes": (
        f"train TEXT -o MADE {SMALL} --max-steps 4 --seed 0 --threads 1 --nproc 2",
        f"train TEXT -o MADE {SMALL} --max-steps 4 --seed 0 --threads 1 --nproc 2 runtime.shard=true",
    ),
    "books": (
        "eval READ -m books --json --per-token OUT --threads 1",
        "eval READ -m books --json --mem-len 32 --limit 600 --threads 1",
        "eval READ -m books --json --limit 600 --adapt --context-cache 1000 --threads 1",
        "eval READ -m books --json --limit 600 .memory_dtype=int8 .weight_dtype=int8 --threads 1",
        "eval READ -m books --json --limit 600 --threads 2",
        "stream READ -m books --json --state-out OUT --threads 1",
        "generate Before -m books -n 60 -t 0 --threads 1",
        "generate Before -m books -n 60 --seed 1 --threads 1",
        "generate Before -m books -n 60 --seed 1 --threads 2",
        "generate Before -m books -n 20 -t 0 .weight_dtype=int8 .memory_dtype=bfloat16 --threads 1",
    ),
}
"""Further commands, in order. A trained model is named with commas for blanks; MADE is a folder that is hashed."""

SETTINGS: dict[str, tuple[str, ...]] = {
    "of commands": tuple(
        f"{command} --print-config --json" for command in ("train TEXT", "eval", "generate", "stream")
    ),
    "of presets": tuple(f"train TEXT --preset {name} --print-config --json" for name in PRESETS.split()),
}
"""Configurations, which differ if a key or a default does."""

DROPPED = {
    "seconds", "tokens_per_second", "peak_rss_bytes", "versions", "hardware", "file", "out",
    "model", "model.name", "corpus", "rank_tokens_per_second", "waiting_seconds",
}  # fmt: skip
"""Keys of output that are times, speeds, versions or paths."""
DROPPED_METADATA = re.compile(r"sha256|schema|^model\.|^config$|^tokenizer$|^encoding$|step$")
"""Metadata of files that follow from other results or from the names of settings."""
PRELOADED = (
    "torch", "torch._dynamo", "torch.export", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "torch.utils.checkpoint", "torch.utils.flop_counter", "einops._torch_specific",
    "numpy.ma", "numpy.ctypeslib", "numba.np.npyimpl", "numba.np.arraymath", "numba.np.linalg", "numba.typed.typeddict",
    "numba.typed.typedset", "numba.cpython.unicode", "numba.cpython.randomimpl", "numba.np.random.generator_methods",
    "numba.experimental.jitclass.base", "typer.completion",
)  # fmt: skip
"""Modules that the process imports from which commands are forked, with all that the modules of the checkout import."""
LIST = """
import contextlib, importlib, pkgutil, sys, xlcli
for part in pkgutil.walk_packages(xlcli.__path__, "xlcli."):
    with contextlib.suppress(ImportError):
        importlib.import_module(part.name)
print(*(name for name in sys.modules if name.partition(".")[0] not in ("xlcli", "__main__")))
"""
"""Program that prints these modules."""


def serve() -> None:
    """Forks a process for each request: lines of JSON on descriptor 3, answers on descriptor 4.

    Nothing of the checkout is imported before the fork, because a module may hold what belongs to its process.
    """
    import importlib
    import importlib.util
    import runpy

    spec = importlib.util.find_spec("xlcli")
    os.write(4, (json.dumps(spec.origin if spec else None) + "\n").encode())
    listed = subprocess.run([sys.executable, "-P", "-c", LIST], stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in (*PRELOADED, *listed.split()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "xlcli" not in sys.modules
    gc.collect()
    gc.freeze()
    while request := _line(3):
        words, folder, streams = json.loads(request)
        child = os.fork()
        if not child:
            os.close(3)
            os.close(4)
            os.chdir(folder)
            modes = os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT
            for descriptor, (path, mode) in enumerate(zip(streams, modes, strict=True)):
                file = os.open(path, mode, 0o600)
                os.dup2(file, descriptor)
                os.close(file)
            sys.argv = ["xlcli", *words]
            code = 0
            try:
                runpy.run_module("xlcli", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = int(end.code or 0)
            _end(code)
        os.write(4, f"{child}\n".encode())
        os.write(4, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


def _end(code: int) -> None:
    """Ends a forked process without freeing the modules, which would copy all memory of the one before it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _line(descriptor: int) -> bytes:
    """One line, read byte by byte, so that nothing is left in a buffer that a forked process inherits."""
    line = b""
    while (part := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += part
    return line


class Checkout:
    """Runs commands of a checkout in a private folder: home, cache and models are there."""

    def __init__(self, folder: Path, python: str, side: str, *, fresh: bool) -> None:
        self.root, self.python, self.words = folder.resolve(), python, WORDS[side]
        self.work = Path(tempfile.mkdtemp(prefix="checkout-"))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XLCLI_", "XDG_", "OMP_", "MKL_", "PYTHON", "COLUMNS", "LINES"))
        }
        self.environment = kept | {
            "HOME": str(self.work), "XLCLI_CACHE": str(self.work / "cache"), "NO_COLOR": "1",
            "PYTHONPATH": str(self.root),
        }  # fmt: skip
        self.n_commands = 0
        self.server: subprocess.Popen[bytes] | None = None
        self.pipes: tuple[int, int] = (-1, -1)
        if not fresh:
            self._start()

    def _start(self) -> None:
        requests, to_server = os.pipe()
        from_server, answers = os.pipe()

        def connect() -> None:
            first, second = os.dup(requests), os.dup(answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.server = subprocess.Popen(
            [self.python, "-P", str(Path(__file__).resolve()), "serve"],
            cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            close_fds=False, preexec_fn=connect,
        )  # fmt: skip
        os.close(requests)
        os.close(answers)
        self.pipes = to_server, from_server
        origin = json.loads(_line(from_server) or b"null")
        if origin is None or self.root not in Path(origin).parents:
            raise SystemExit(f"{self.python} imports {origin}, not the package of {self.root}")

    def close(self) -> None:
        """Ends the server and removes the folder."""
        if self.server is not None:
            os.close(self.pipes[0])
            self.server.wait()
            os.close(self.pipes[1])
        shutil.rmtree(self.work, ignore_errors=True)

    def run(self, line: str, names: Mapping[str, str | Path]) -> tuple[int, bytes, str]:
        """Exit code, standard output and error of a command of the tables."""
        words: list[str] = []
        standard_input = os.devnull
        parts = iter(line.split())
        for part in parts:
            if part == "<":
                standard_input = str(names[next(parts)])
                continue
            written = self.words.get(part, part).split()
            words += (word for w in written for word in (_setting(w, words[0]) if _is_setting(w, words) else (w,)))
        words = [str(names.get(word, word)) for word in words]
        self.n_commands += 1
        out, err = self.work / "stdout", self.work / "stderr"
        for file in (out, err):
            file.unlink(missing_ok=True)
        streams = [standard_input, str(out), str(err)]
        if self.server is None:
            command = [self.python, "-P", "-m", "xlcli", *words]
            with Path(streams[0]).open("rb") as stdin, out.open("wb") as stdout, err.open("wb") as stderr:
                code = subprocess.run(
                    command, cwd=self.work, env=self.environment, stdin=stdin, stdout=stdout, stderr=stderr, check=False
                ).returncode
        else:
            os.write(self.pipes[0], (json.dumps([words, str(self.work), streams]) + "\n").encode())
            _line(self.pipes[1])
            code = int(_line(self.pipes[1]))
        return code, out.read_bytes(), err.read_text(errors="replace")


def _setting(word: str, command: str) -> tuple[str, str]:
    return "--set", command + word if word.startswith(".") else word


def _is_setting(word: str, before: list[str]) -> bool:
    return "=" in word and not word.startswith("-") and before[-1:] != ["--set"]


def sha(data: bytes) -> str:
    """First 16 digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def file_result(path: Path) -> Result:
    """Content of a file: tensors and metadata, rows of numbers, or its hash."""
    data = path.read_bytes()
    [size] = struct.unpack_from("<Q", data) if len(data) > 8 else (0,)
    if 0 < size < len(data) and data[8:9] == b"{":
        return tensors(data, size) | {"file": sha(data)}
    rows = _rows(data)
    bits = [row["bits"] for row in rows if isinstance(row, dict) and "bits" in row]
    return {"bytes": len(data), "file": sha(data)} | ({"bits": math.fsum(bits)} if bits else {})


def tensors(data: bytes, size: int) -> Result:
    """Tensors of a safetensors file: type, shape, hash and mean magnitude of each, and the metadata that matter."""
    header = json.loads(data[8 : 8 + size])
    metadata = {k: v for k, v in header.pop("__metadata__", {}).items() if not DROPPED_METADATA.search(k)}
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        part = data[8 + size + start : 8 + size + end]
        magnitude = _magnitude(entry["dtype"], part)
        kind = f"{entry['dtype']} {entry['shape']}"
        found[name] = {"kind": kind, "sha": sha(part)} | ({} if magnitude is None else {"magnitude": magnitude})
    return {"tensors": found, "metadata": metadata}


def _magnitude(dtype: str, data: bytes) -> float | None:
    formats = {"F64": "d", "F32": "f", "I8": "b"}
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        dtype = "F32"
    if dtype not in formats or not data or len(data) > 2**20:
        return None
    values = struct.unpack(f"<{len(data) // struct.calcsize(formats[dtype])}{formats[dtype]}", data)
    return math.fsum(map(abs, values)) / len(values)


def _rows(data: bytes) -> list[Any]:
    """Lines of JSON; empty if a line is anything else."""
    try:
        return [json.loads(line) for line in data.decode().splitlines() if line.strip()]
    except ValueError:
        return []


def cleaned(value: Any) -> Any:
    """Value without the keys `DROPPED`."""
    if isinstance(value, dict):
        return {RESULTS.get(key, key): cleaned(part) for key, part in value.items() if key not in DROPPED}
    return [cleaned(part) for part in value] if isinstance(value, list) else value


def output_result(out: bytes) -> Any:
    """Standard output: rows of JSON, cleaned, or text."""
    try:
        return cleaned(json.loads(out))
    except ValueError:
        rows = _rows(out)
        return cleaned(rows) if any(isinstance(row, dict) for row in rows) else out.decode("latin-1")


def model_result(folder: Path) -> Result:
    """Losses of every step and the weights of a model folder."""
    rows = _rows((folder / "metrics.jsonl").read_bytes()) if (folder / "metrics.jsonl").exists() else []
    record = json.loads((folder / "record.json").read_text()) if (folder / "record.json").exists() else {}
    scores = {key: record.get(key) for key in ("parameters", "steps", "tokens", "bits_per_byte", "stopped_early")}
    return {"metrics": cleaned(rows), "record": scores, "weights": file_result(folder / "model.safetensors")}


class Recorder:
    """Runs cases of one checkout."""

    def __init__(self, checkout: Checkout, texts: Path) -> None:
        self.checkout, self.work = checkout, checkout.work
        self.problems: list[str] = []
        self.trained: dict[str, Result] = {}
        self.last = ""
        self.names: dict[str, str | Path] = write_texts(texts, self.work)

    def run(self, line: str, names: Mapping[str, str | Path] | None = None) -> Result:
        """Results of one command."""
        out, made = self.work / "out" / "it.jsonl", self.work / "made"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        shutil.rmtree(made, ignore_errors=True)
        known = {**self.names, "OUT": out, "LAST": self.last, "MADE": made, **(names or {})}
        code, output, error = self.checkout.run(line, known)
        if code:
            self.problems.append(f"{line}: exit code {code}: {error.strip()[-300:]}")
            return {"exit code": code, "error": error.strip().splitlines()[-1:]}
        if "--print-config" in line:
            return {"output": json.loads(output)}
        result: Result = {} if "MADE" in line else {"output": output_result(output)}
        if out.exists():
            result["saved"] = file_result(out)
            self.last = str(shutil.move(out, self.work / "last"))
        if made.exists():
            result["model"] = model_result(made)
        return result

    def model(self, name: str, flags: str) -> Path:
        """Folder of a trained model; trains it if it is not there."""
        folder = self.work / "models" / name
        if name not in self.trained:
            text = "DOCUMENTS" if "reset_on_document" in flags else "TEXT"
            code, _, error = self.checkout.run(f"train {text} -o FOLDER {flags}", {**self.names, "FOLDER": folder})
            if code:
                self.problems.append(f"train {name}: exit code {code}: {error.strip()[-300:]}")
                self.trained[name] = {"exit code": code}
            else:
                self.trained[name] = model_result(folder)
        return folder

    def resumed(self, name: str, flags: str) -> Result:
        """Results of the run that lost everything after its checkpoint of step 3."""
        whole = self.model(name, flags)
        folder = self.work / "models" / "resumed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        (folder / "model.safetensors").unlink()
        *_, last = sorted((folder / "checkpoints").glob("step-*"))
        shutil.rmtree(last)
        text = "DOCUMENTS" if "reset_on_document" in flags else "TEXT"
        code, _, error = self.checkout.run(f"train {text} -o FOLDER {flags} --resume", {**self.names, "FOLDER": folder})
        if code:
            self.problems.append(f"resume {name}: exit code {code}: {error.strip()[-300:]}")
            return {"exit code": code}
        result = model_result(folder)
        equal = result["weights"] == self.trained[name]["weights"]
        if not equal:
            self.problems.append(f"resume {name}: other weights than the uninterrupted run")
        return result | {"equals the uninterrupted run": equal}

    def killed(self, flags: str) -> Result:
        """Results of a run that was killed in between and resumed."""
        whole, folder = self.work / "models" / "whole", self.work / "models" / "killed"
        flags = f"{flags} --max-steps 200 train.save_every=20 train.eval_every=50"
        line = f"train TEXT -o FOLDER {flags}"
        self.checkout.run(line, {**self.names, "FOLDER": whole})
        words = [str({**self.names, "FOLDER": folder}.get(word, word)) for word in line.split()]
        words = [part for word in words for part in (("--set", word) if _is_setting(word, []) else (word,))]
        process = subprocess.Popen(
            [self.checkout.python, "-P", "-m", "xlcli", *words],
            cwd=self.work, env=self.checkout.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        metrics = [folder / "metrics.jsonl", folder / ".replacement" / "metrics.jsonl"]
        while process.poll() is None and not any(m.exists() and m.read_bytes().count(b"\n") > 60 for m in metrics):
            time.sleep(0.01)
        was_killed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        code, _, error = self.checkout.run(f"{line} --resume", {**self.names, "FOLDER": folder})
        if code or not was_killed:
            self.problems.append(f"killed run: exit code {code}: {error.strip()[-300:]}")
        results = [model_result(path)["weights"] for path in (whole, folder)]
        return {"weights": results[0], "equals the uninterrupted run": results[0] == results[1]}


def write_texts(source: Path, folder: Path) -> dict[str, str | Path]:
    """Texts of all cases, and their names in the tables."""
    data = source.read_bytes()
    text, read = data[:6000], data[-1200:]
    lines = read.decode().split("\n")
    documents = [
        {"title": f"Part {i}", "text": data[7000 + 311 * i :][: 90 + 61 * (i * i % 7)].decode()} for i in range(24)
    ]
    prompts = [{"prompt": line, "id": i} for i, line in enumerate(lines[3:9])]
    files = {
        "TEXT": ("text.txt", text),
        "READ": ("read.txt", read),
        "BINARY": ("binary.bin", bytes((i * i + i // 7) % 256 for i in range(600))),
        "DOCUMENTS": ("documents.jsonl", b"".join(json.dumps(d).encode() + b"\n" for d in documents)),
        "PROMPTS": ("prompts.jsonl", b"".join(json.dumps(prompt).encode() + b"\n" for prompt in prompts)),
        "PROMPT_LINES": ("lines.txt", b"Before we\nproceed any\n"),
    }  # fmt: skip
    names: dict[str, str | Path] = {}
    for name, (file, content) in files.items():
        (folder / file).write_bytes(content)
        names[name] = file
    return names | {"TEXT_AS_PROMPT": data[2000:2500].decode()}


def training_flags() -> dict[str, str]:
    """Name of each trained model to its options."""
    models = {name: f"{SMALL} {RUN} {flags}" for name, flags in (FULLY | BRIEFLY).items()}
    for preset in PRESETS.split():
        shape = PRESET_SMALL.replace("PRESET", preset)
        models[f"preset {preset}"] = f"{shape} {RUN} {SMALL_OF_PRESET.get(preset, '')}"
    return models


def cases() -> Iterator[str]:
    """Names of all cases in their order."""
    for name in training_flags():
        yield f"train/{name}"
    yield "train/killed"
    yield from (f"further/{name}" for name in FURTHER)
    yield from (f"settings/{name}" for name in SETTINGS)


def run_case(recorder: Recorder, case: str) -> Result:
    """Results of a case."""
    group, name = case.split("/", 1)
    flags = training_flags()
    if case == "train/killed":
        return recorder.killed(f"{SMALL} {RUN}")
    if group == "train":
        folder = recorder.model(name, flags[name])
        result: Result = {"train": recorder.trained[name]}
        if "exit code" in result["train"]:
            return result
        for title, line in (EVAL | (ALL if name in FULLY else {})).items():
            result[title] = recorder.run(line, {"MODEL": folder})
        if name in FULLY:
            result["resume"] = recorder.resumed(name, flags[name])
        return result
    result = {}
    for number, line in enumerate({"further": FURTHER, "settings": SETTINGS}[group][name], start=1):
        models = {word: word.replace(",,", ", ").replace(",", " ").replace("  ", ", ") for word in line.split()}
        used = {word: recorder.model(title, flags[title]) for word, title in models.items() if title in flags}
        result[f"{number}: {line}"] = recorder.run(line, used)
    return result


def record(checkout: Checkout, texts: Path, only: str, out: Path | None = None) -> Result:
    """Results of all cases of one checkout whose name matches; `out` is written after each, and continued."""
    source = source_hash(checkout.root)
    found: Result = {"source": source, "results": {}, "seconds": {}}
    if out is not None and out.exists():
        found = json.loads(out.read_text())
        if found["source"] != source:
            raise SystemExit(f"{out} is a recording of other files. Remove it, or name another.")
    recorder, results = Recorder(checkout, texts), {}
    for case in cases():
        if not re.search(only, case) or case in found["results"]:
            continue
        started, n_problems = time.monotonic(), len(recorder.problems)
        results[case] = run_case(recorder, case)
        seconds = round(time.monotonic() - started, 2)
        print(f"{seconds:7.1f} s  {case}", file=sys.stderr, flush=True)
        for problem in recorder.problems[n_problems:]:
            print(f"problem: {problem}", file=sys.stderr, flush=True)
        if out is None or n_problems == len(recorder.problems):
            found["results"][case], found["seconds"][case] = results[case], seconds
        if out is not None:
            save(out, found)
    print(f"{checkout.n_commands} commands, {sum(found['seconds'].values()):.0f} s", file=sys.stderr)
    return found | {"problems": recorder.problems}


def source_hash(root: Path) -> str:
    """Hash of all modules and presets of a checkout."""
    paths = [*sorted((root / "xlcli").rglob("*.py")), *sorted((root / "models").glob("*.toml"))]
    return sha(b"".join(path.read_bytes() for path in paths))


def save(out: Path, found: Result) -> None:
    """Replaces a recording."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(out)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every part that is no table or list."""
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}/{key}")
    else:
        yield path, value


def differences(old: Result, new: Result, ignored: str | None) -> list[str]:
    """A line for every result that differs, with the size of the difference."""
    before, after = dict(leaves(old)), dict(leaves(new))
    found = []
    for path in [*before, *(path for path in after if path not in before)]:
        if ignored and re.search(ignored, path):
            continue
        if path not in after:
            found.append(f"{path[1:]}: only in old: {before[path]!r}")
        elif path not in before:
            found.append(f"{path[1:]}: only in new: {after[path]!r}")
        elif before[path] != after[path] and not (before[path] != before[path] and after[path] != after[path]):
            found.append(f"{path[1:]}: {_change(before[path], after[path])}")
    return found


def _change(old: Any, new: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    if not numbers:
        return f"{old!r} -> {new!r}"
    size = abs(new - old)
    return f"{old!r} -> {new!r} (differs by {size:.3g}, relative {size / max(abs(old), 1e-300):.3g})"


def results_of(source: Path, python: str, side: str, options: argparse.Namespace) -> Result:
    """Results of a recording, or of a checkout, which is run."""
    if source.is_file():
        results: Result = json.loads(source.read_text())["results"]
        return {case: value for case, value in results.items() if re.search(options.only, case)}
    checkout = Checkout(source, python, side, fresh=options.fresh)
    try:
        return json.loads(json.dumps(record(checkout, options.texts, options.only)["results"]))  # type: ignore[no-any-return]
    finally:
        checkout.close()


def compare(options: argparse.Namespace) -> int:
    """Prints differences; 1 if there are any."""
    old = results_of(options.old, options.python, "old", options)
    new = results_of(options.new, options.new_python or options.python, "new", options)
    both = old.keys() & new.keys()
    lines = [
        f"{case}: only in {'old' if case in old else 'new'}" for case in cases() if case in old.keys() ^ new.keys()
    ]
    lines += differences({c: old[c] for c in old if c in both}, {c: new[c] for c in new if c in both}, options.ignore)
    print("\n".join(lines))
    differing = {tuple(line.split(": ")[0].split("/")[:2]) for line in lines}
    print(f"{len(lines)} differences in {len(differing)} of {len(old.keys() | new.keys())} cases")
    return int(bool(lines))


def measure(options: argparse.Namespace) -> int:
    """Prints medians of times per token of both checkouts, measured in turn."""
    sides = {"old": (options.old, options.python), "new": (options.new, options.new_python or options.python)}
    checkouts = {side: Checkout(folder, python, side, fresh=True) for side, (folder, python) in sides.items()}
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.rounds):
        for what in ("decode", "eval", "train"):
            for side, checkout in checkouts.items():
                line = f"bench {what} --json --seconds {options.seconds} --threads {options.threads}"
                code, out, error = checkout.run(line, {})
                if code:
                    raise SystemExit(error)
                for path, value in leaves(json.loads(out)):
                    if re.search(r"tokens_per_second|seconds|ms|micro", path) and isinstance(value, int | float):
                        found.setdefault((what, path, side), []).append(float(value))
    for checkout in checkouts.values():
        checkout.close()
    for what, path in dict.fromkeys((what, path) for what, path, _ in found):
        old, new = (statistics.median(found.get((what, path, side), [math.nan])) for side in sides)
        print(f"{what} {path[1:]}: {old:.4g} -> {new:.4g} ({new / old if old else math.nan:.3f})")
    return 0


def main() -> int:
    if sys.argv[1:] == ["serve"]:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    root = Path(__file__).resolve().parents[2]
    modes.add_parser("list")
    for mode in ("record", "compare", "time"):
        part = modes.add_parser(mode)
        if mode == "record":
            part.add_argument("out", type=Path)
            part.add_argument("--checkout", type=Path, default=root)
            part.add_argument("--side", choices=("old", "new"), default="old", help="column of WORDS")
        else:
            part.add_argument("old", type=Path)
            part.add_argument("new", type=Path)
            part.add_argument("--new-python")
        part.add_argument("--python", default=sys.executable)
        if mode == "time":
            part.add_argument("--rounds", type=int, default=7)
            part.add_argument("--seconds", type=float, default=3.0)
            part.add_argument("--threads", type=int, default=1)
            continue
        part.add_argument("--only", default="")
        part.add_argument("--fresh", action="store_true", help="an interpreter for each command")
        part.add_argument("--texts", type=Path, default=root / "demo" / "shakespeare.txt")
        if mode == "compare":
            part.add_argument("--ignore")
    options = parser.parse_args()
    if options.mode == "list":
        print("\n".join(cases()))
        return 0
    if options.mode == "compare":
        return compare(options)
    if options.mode == "time":
        return measure(options)
    checkout = Checkout(options.checkout, options.python, options.side, fresh=options.fresh)
    try:
        recorded = record(checkout, options.texts, options.only, options.out)
    finally:
        checkout.close()
    return int(bool(recorded["problems"]))


if __name__ == "__main__":
    sys.exit(main())
