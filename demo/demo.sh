#!/bin/sh
# All commands in about four minutes: generate, train, evaluate with and without memory, generate, stream.
# Usage: demo.sh XLCLI FOLDER (see make demo). The folder is emptied first and kept afterwards.
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

# Prints a command and runs it.
run() {
    printf '\n%s$ %s%s\n' "$bold" "$1" "$plain"
    eval "$1"
}

say "1 of 5: generate with the bundled model of English books"
run 'xlcli generate "It was a dark night, and" --max-new-tokens 80 --seed 1'
echo

say "2 of 5: train a model on one text file in $time"
run "xlcli train shakespeare.txt --max-time $time"

say "3 of 5: evaluate it on its validation text with memory of 0, 128 and 512 tokens"
run 'xlcli eval --sweep-mem-len 0,128,512'

say "4 of 5: generate with it and save the state"
run 'xlcli generate "ROMEO:" --max-new-tokens 80 --seed 1 --state-out romeo.state'
echo

say "5 of 5: score a pipe line by line; the number is the surprisal in bits per byte"
run 'head -12 shakespeare.txt | xlcli stream'

say "The files are in $2; all commands: $1 --help"
