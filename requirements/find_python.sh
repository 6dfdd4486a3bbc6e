#!/bin/sh
# Prints the first interpreter of the wanted minor versions that can make a virtual environment.
#   find_python.sh 11 12 13     Python 3.11, else 3.12, else 3.13
# Looks on PATH (a version manager's stand-in that cannot start is passed over), then at pyenv's
# versions. Prints nothing and exits with 1 where none is found.
for minor in "$@"; do
    for candidate in "python3.$minor" python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
        found=$("$candidate" -c "import sys, venv, ensurepip
if sys.version_info[:2] == (3, $minor): print(sys.executable)" 2>/dev/null </dev/null)
        if [ -n "$found" ]; then
            echo "$found"
            exit 0
        fi
    done
done
exit 1
