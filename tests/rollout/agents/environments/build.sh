#!/usr/bin/env bash
# The harnesses that `--agent` starts, for tests, each in the version of its entry (agentgym/rollout/agents/harnesses.py).
#
#   build.sh         installs what is not there yet; what is there is used as it is
#   build.sh --path  prints the folders of their programs, as they go before PATH
#
# They live under $AGENTGYM_HARNESSES (~/.cache/agentgym-harnesses), in a folder for each content of what makes it;
# $PYTHON is one that can import agentgym. Node 22, which one of them needs, is installed beside them, and so are the
# SDKs of examples/agents, in an environment that has the packages of $PYTHON after its own.
set -euo pipefail
sdks="openai-agents==0.24.0 langgraph==1.2.24 langchain-openai==1.7.4 langchain-mcp-adapters==0.3.2"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$(command -v "${PYTHON:-python3}")"
python="$(cd "$(dirname "$python")" && pwd)/${python##*/}" # as it is named: of an environment, a link
packages="$("$python" - <<'END'
from agentgym.rollout.agents.harnesses import HARNESSES

for harness in HARNESSES.values():
    tool, *_, package = harness.install.split()
    print(tool, package)
END
)"
digest="$(cat "$here/build.sh" - <<<"$packages" | sha256sum)"
folder="${AGENTGYM_HARNESSES:-${HOME:?}/.cache/agentgym-harnesses}/${digest:0:12}"

if [ "${1:-}" = "--path" ]; then
    echo "$folder/node/node_modules/.bin:$folder/python/bin:$folder/sdks/bin"
    exit
fi
mkdir -p "$folder/node"
exec 9>"$folder/.lock"
flock 9 # of two builds the second waits and finds it built
add_packages() { # of $PYTHON, after those of the SDKs: another clone's may be gone
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$folder/sdks/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages_of_python.pth"
}
if [ -f "$folder/.complete" ]; then
    add_packages
    exit
fi
named() { awk -v tool="$1" '$1 == tool { print $2 }' <<<"$packages"; }
cd "$folder/node"
echo '{}' >package.json
npm install --no-audit --no-fund node@22
# By Node 22: by an older one npm takes an older version of Claude Code.
PATH="$PWD/node_modules/.bin:$PATH" npm install --no-audit --no-fund $(named npm)
"$python" -m venv "$folder/python"
"$folder/python/bin/python" -m pip --quiet --disable-pip-version-check install $(named pip)
"$python" -m venv "$folder/sdks"
"$folder/sdks/bin/python" -m pip --quiet --disable-pip-version-check install $sdks
add_packages
touch "$folder/.complete"
