#!/usr/bin/env bash
# Makes the virtual environment DIR when it is missing or its interpreter is gone, with pip at the pinned version.
# usage: make-venv.sh DIR PIP_VERSION [PYTHON]
set -euo pipefail
directory=$1
pip_version=$2
python=${3:-}

# A name on the path may be a stub of a version manager that fails when it is run, so each candidate is run.
# An abi3 extension does not load in a free-threaded interpreter.
suitable='
import sys, sysconfig
if sys.version_info < (3, 10):
    sys.exit("it is Python %d.%d" % sys.version_info[:2])
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("it is a free-threaded build")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("it has no %s (Debian: install python3-venv)" % error.name)
'

if ! "$directory/bin/python" -c "$suitable"$'\n''import pip' 2>/dev/null; then
    found=
    reasons=
    for candidate in ${python:-python3.13 python3.12 python3.11 python3.10 python3}; do
        command -v "$candidate" >/dev/null || continue
        if reason=$("$candidate" -c "$suitable" 2>&1); then
            found=$candidate
            break
        fi
        reasons+="  $candidate: ${reason%%$'\n'*}"$'\n'
    done
    if [ -z "$found" ]; then
        echo "make: no Python >= 3.10 with venv found${python:+ at PYTHON=$python}: install one, or name it: make PYTHON=..." >&2
        printf '%s' "$reasons" >&2
        exit 1
    fi
    echo "make: making $directory with $("$found" --version) ($found)" >&2
    "$found" -m venv --clear "$directory"
fi

if [ "$("$directory/bin/python" -m pip --version | cut -d ' ' -f 2)" != "$pip_version" ]; then
    "$directory/bin/python" -m pip install --quiet "pip==$pip_version"
fi
