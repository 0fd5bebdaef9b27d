#!/usr/bin/env bash
# The figures of the bundled model in its card and in docs/, remade from the stored weights.
#
#     benchmarks/bundled.sh OUT DATA [STAGE ...]
#
# DATA is a folder with books/{train,valid,test}, books-more/train, logs/*_2k.log of Loghub, enwik8-prefix.txt.gz, book1
# of the Calgary corpus, clones of naturalstories and blimp, provo, and full_eval of BabyLM (benchmarks/reading.py,
# benchmarks/pairs.py). MODEL names another model than `books`, PYTHON the interpreter. One thread, but for decode; two calls with different stages can run side by side.
#
#     valid       card: the whole validation text          samples     card: ten samples
#     test        card: memory lengths, by context         sampling    card, log: figures of sampled text, loops
#     books       results.md: test books                   reading     results.md: reading times
#     standard    results.md: book1, enwik8                pairs       results.md: pairs of sentences
#     logs        results.md: ten logs                     decode      results.md: decoding
#
# A stage writes OUT/STAGE.log, results beside it, and OUT/STAGE.done when it succeeds; a restarted script skips it then.
set -u
[ $# -ge 2 ] || { sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
home=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && out=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || exit 1
shift 2
model=${MODEL:-books} python=${PYTHON:-python3}
. "$home/benchmarks/stages.sh"
export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
cd "$out" || exit 1

xlcli() { "$python" -m xlcli "$@"; }
benchmark() { "$python" "$home/benchmarks/$1.py" "${@:2}"; }
adapting() { benchmark adapting "${@:2}" --model "$model" --limit 10000000 --out "$out/$1.json"; }

valid() { xlcli eval "$data/books/valid" -m "$model"; }
test_stage() {
  xlcli eval "$data/books/test" -m "$model" --segment-len 256 --sweep-mem-len 0,1024,4096 &&
    xlcli eval "$data/books/test" -m "$model" --segment-len 256
}

books() { adapting books "$data"/books/test/*; }
logs() { adapting logs "$data"/logs/*_2k.log; }

standard() {
  local n
  for n in 1000000 3000000; do zcat "$data/enwik8-prefix.txt.gz" | head -c $n > enwik8-$n || return 1; done
  adapting standard "$data/book1" enwik8-1000000 enwik8-3000000
}

samples() {
  local seed
  for seed in 1 2 3 4 5 6 7 8 9 10; do
    xlcli generate 'It was a dark night, and' -m "$model" -n 60 --seed $seed -q && echo || return 1
  done
}

sampling() {
  local texts=(--model "$model" --valid "$data/books/valid" --train "$data/books/train" "$data/books-more/train")
  local default='temperature=0.8 top_p=0.95 repetition_penalty=1.1'
  benchmark sampling "${texts[@]}" --prompts 100 --out "$out/sampling.json" --settings "$default" &&
    benchmark sampling "${texts[@]}" --prompts 500 --prompt-tokens 8 --out "$out/loops.json" --settings "$default"
}

reading() {
  local eyes=(--provo "$data/provo" --ucl "$data/full_eval/reading/reading_data.csv")
  benchmark reading "$data/naturalstories" "${eyes[@]}" -m "$model" --out "$out/reading.json"
}

pairs() {
  local babylm=(--babylm "$data/full_eval" -m "$model" --out "$out/pairs.json")
  benchmark pairs "$data/blimp" "${babylm[@]}" --sets blimp blimp_filtered supplement ewok &&
    benchmark pairs "${babylm[@]}" --sets entity_tracking --items 30
}

decode() { xlcli bench decode -m "$model" --threads 2; }

[ $# -gt 0 ] || set -- valid test samples decode books standard logs sampling reading pairs
run_stages "$@"
