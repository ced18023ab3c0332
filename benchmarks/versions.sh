#!/usr/bin/env bash
# Runs the tests with other versions of PyTorch than the one in constraints.txt:
#
#     benchmarks/versions.sh 2.11.0 2.15.0
#     benchmarks/versions.sh 2.14.1 -- tests/parity -k gpt2
#
# Each version gets an environment of its own, `.venv-torch-VERSION`, with the other packages of constraints.txt. What
# follows `--` goes to pytest, in place of `--sparse tests` without tests/programs and tests/architecture. The last line
# is JSON: for each version pytest's exit code and its summary. The exit code is that of the last version that failed.
set -uo pipefail
cd "$(dirname "$0")/.."

versions=()
while (($#)) && [[ $1 != -- ]]; do
    versions+=("$1")
    shift
done
if ((${#versions[@]} == 0)); then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
chosen=("${@:2}")
((${#chosen[@]})) || chosen=(--sparse tests --ignore tests/programs --ignore tests/architecture)

export OMP_NUM_THREADS=1
worst=0 found=()
for version in "${versions[@]}"; do
    place=.venv-torch-$version
    if [[ ! -e $place/.installed ]]; then
        python3.11 -m venv "$place"
        # Dependencies are installed by name: the package's own cap would keep out releases newer than those tested.
        "$place/bin/python" - >"$place/wanted.txt" <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *extras["accelerate"], *extras["examples"], *extras["dev"]]
print(*(each for each in wanted if not each.startswith("torch>")), sep="\n")
PYTHON
        grep -v '^torch==' constraints.txt >"$place/constraints.txt"
        "$place/bin/python" -m pip install --quiet --disable-pip-version-check -c "$place/constraints.txt" \
            -r "$place/wanted.txt" "torch==$version" &&
            "$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e . &&
            touch "$place/.installed" || exit 1
    fi
    "$place/bin/python" -m pytest -p no:cacheprovider "${chosen[@]}" 2>&1 | tee "$place/tests.log"
    code=${PIPESTATUS[0]}
    ((code)) && worst=$code
    summary=$(tail -n 1 "$place/tests.log" | tr -d '="')
    found+=("\"$version\": {\"exit_code\": $code, \"summary\": \"$(echo $summary)\"}")
done
(IFS=,; echo "{${found[*]}}")
exit "$worst"
