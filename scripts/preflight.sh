#!/usr/bin/env bash
# Says in a sentence what is missing, before anything is installed. Usage: preflight.sh PYTHON MIN_MEMORY_GIB
set -euo pipefail
python=$1 min_gib=$2

fail() { echo "raysessions: $*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "Linux is needed (vLLM and DeepSpeed run there only); this is $(uname -s)."
command -v "$python" >/dev/null || fail "$python was not found. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: Python 3.11 or newer is needed. Name one with make PYTHON=…"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module: install it (Debian: python3-venv)."
for tool in gcc g++; do
  command -v "$tool" >/dev/null || fail "$tool was not found: DeepSpeed compiles a small library with it (Debian: apt-get install build-essential)."
done
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || fail "Python.h is missing in $headers: install Python's headers (Debian: python3-dev)."

# A container's limit counts, not the host's memory.
free_kib=$(awk '/MemAvailable/ {print $2}' /proc/meminfo)
for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  [ -r "$limit" ] || continue
  bytes=$(cat "$limit")
  case $bytes in max | *[!0-9]*) continue ;; esac
  [ $((bytes / 1024)) -lt "$free_kib" ] && free_kib=$((bytes / 1024))
done
[ "$free_kib" -ge $((min_gib * 1024 * 1024)) ] ||
  fail "$((free_kib / 1024)) MiB of memory are free; trainer and sampler together need $min_gib GiB. Close something, or use a larger machine."
free_disk_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$free_disk_kib" -ge $((8 * 1024 * 1024)) ] || fail "$((free_disk_kib / 1024)) MiB of disk are free here; the packages need 8 GiB."
