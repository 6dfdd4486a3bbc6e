#!/bin/sh
# Resolves everything that CI installs afresh and writes it down, one version a package.
#   lock.sh PYTHON OUTPUT 'jax>=0.10.2,<0.11'
set -eu
python=$1 output=$2 jax=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" - > "$scratch/wanted.txt" <<'END'
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["test"], *extras["docs"], sep="\n")
END
echo "$jax" >> "$scratch/wanted.txt"
"$python" -m venv "$scratch/venv"
pip="$scratch/venv/bin/python -m pip --disable-pip-version-check"
$pip uninstall --quiet --yes setuptools  # old Pythons put it there; nothing wanted needs it
$pip install --quiet --upgrade pip
$pip install --quiet -r "$scratch/wanted.txt"
{
    echo "# Python $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'), $jax. Made by \`make lock\`; do not edit."
    $pip freeze --all  # names neither an index nor a host
} > "$scratch/lock.txt"
mv "$scratch/lock.txt" "$output"
