#!/bin/sh
# Everything xlcli does, in about four minutes: generate, train, evaluate with and without memory, generate, stream.
# Usage: demo.sh XLCLI FOLDER (make demo does it). The folder is emptied first, and kept for a look afterwards.
set -eu
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
text=$(cd "$(dirname "$0")" && pwd)/shakespeare.txt
time=${XLCLI_MAX_TIME:-2m}
unset XLCLI_MAX_TIME
rm -rf "$2"
mkdir -p "$2"
cp "$text" "$2"
cd "$2"

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$(printf '\033[1m') plain=$(printf '\033[0m')
fi

say() {
    printf '\n%s--- %s%s\n' "$bold" "$1" "$plain"
}

xlcli() {
    "$program" "$@"
}

# What is shown is what is run.
run() {
    printf '\n%s$ %s%s\n' "$bold" "$1" "$plain"
    eval "$1"
}

say "1 of 5: the bundled model, trained on nineteenth-century books, continues a sentence"
run 'xlcli generate "It was a dark night, and" --max-new-tokens 80 --seed 1'
echo

say "2 of 5: a model of your own from one text file, in $time"
run "xlcli train shakespeare.txt --max-time $time"

say "3 of 5: the same model on its own held-out text, without memory and with more and more of it"
run 'xlcli eval --sweep-mem-len 0,128,512'

say "4 of 5: it writes, and keeps what it has read in a file"
run 'xlcli generate "ROMEO:" --max-new-tokens 80 --seed 1 --state-out romeo.state'
echo

say "5 of 5: a pipe, scored line by line as it arrives; the number is surprise in bits per byte"
run 'head -12 shakespeare.txt | xlcli stream'

say "Everything is in $2; there is more: $1 --help"
