#!/usr/bin/env bash
# The real engines on CPU, for tests, each in an environment of its own.
#
#   build.sh NAME...      builds what is not there yet, side by side; a finished one is used as it is
#   build.sh --path NAME  prints the interpreter to run it with, whether it is there or not
#
# NAME is a requirement file here, without `.txt`. Environments live under $AGENTGYM_ENGINES (~/.cache/agentgym-engines),
# one for each content of what makes it; $PYTHON makes them.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${AGENTGYM_ENGINES:-${HOME:?}/.cache/agentgym-engines}"

environment() { # NAME: its folder
    local digest
    digest="$(cd "$here" && cat build.sh "$1.txt" standin/sitecustomize.py standin/sgl_kernel/__init__.py | sha256sum)"
    echo "$root/$1-${digest:0:12}"
}

require() { # NAME: known, or the script ends
    [ -f "$here/$1.txt" ] && return
    echo "no engine environment '$1' here: there are $(cd "$here" && basename -s .txt -- *.txt | xargs)" >&2
    exit 2
}

pip_install() { # PYTHON WORDS...
    "$1" -m pip --quiet --disable-pip-version-check install "${@:2}"
}

install() { # NAME FOLDER
    local name=$1 folder=$2 python="$2/bin/python"
    "${PYTHON:-python3}" -m venv "$folder"
    # torch first and pinned, with what its build needs: without the pin an index may answer with gigabytes of CUDA.
    pip_install "$python" --constraint "$here/$name.txt" "$(grep '^torch==' "$here/$name.txt")"
    # The rest is frozen: what the engines ask for beside it are CUDA builds that do not import on CPU.
    pip_install "$python" --no-deps --requirement "$here/$name.txt"
    cp -R "$here/standin" "$folder/standin"
    wrapper "$name" "$python" "$folder/standin" >"$folder/bin/agentgym-python"
}

wrapper() { # NAME PYTHON PATH: the script that runs the engine's python with what it needs on CPU
    echo '#!/bin/sh'
    case $1 in
    sglang)
        echo "export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=\"$3\${PYTHONPATH:+:\$PYTHONPATH}\""
        ;;
    vllm)
        echo 'export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_SERVER_DEV_MODE=1'
        echo 'export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-1}" VLLM_NO_USAGE_STATS=1'
        ;;
    esac
    echo 'export HF_HUB_OFFLINE=1'
    echo "exec \"$2\" \"\$@\""
}

build() { # NAME
    local name=$1 folder started=$SECONDS
    folder="$(environment "$name")"
    mkdir -p "$root"
    exec 9>"$folder.lock"
    flock 9 # two builds of one environment: the second waits and finds it built
    if [ -f "$folder/.complete" ]; then
        echo "$name: $folder"
        return
    fi
    rm -rf "$folder"
    install "$name" "$folder"
    chmod +x "$folder/bin/agentgym-python"
    touch "$folder/.complete"
    echo "$name: $folder, built in $((SECONDS - started)) s"
}

if [ "${1:-}" = "--path" ] && [ $# -eq 2 ]; then
    require "$2"
    echo "$(environment "$2")/bin/agentgym-python"
    exit
fi
[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
for name in "$@"; do require "$name"; done
builds=() status=0
for name in "$@"; do
    build "$name" &
    builds+=($!)
done
for running in "${builds[@]}"; do wait "$running" || status=$?; done
exit "$status"
