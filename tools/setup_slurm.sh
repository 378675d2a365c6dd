#!/usr/bin/env bash
# Puts Slurm (slurmctld, slurmd, its commands) and munged into .slurm/bin, for the tests of runs on Slurm.
# Debian's own packages, and the libraries among their dependencies that this machine lacks, are unpacked there and
# nowhere else: nothing is installed, no service starts, no root is needed. A Slurm that is on the PATH is used instead.
# Safe to run again: does nothing, and says nothing, when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.slurm
packages=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
binaries=(munged slurmctld slurmd slurmstepd sbatch scancel scontrol sinfo squeue srun)

is_ready() {
    local binary
    for binary in "${binaries[@]}"; do [ -x "$folder/bin/$binary" ] || return 1; done
}

is_installed() {
    local binary
    for binary in "${binaries[@]}"; do PATH=$PATH:/usr/sbin command -v "$binary" >/dev/null || return 1; done
}

stop() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_ready && exit 0
is_installed && exit 0
mkdir -p "$folder"
echo '*' >"$folder/.gitignore"
exec 9>"$folder/.lock"
flock 9
is_ready && exit 0
echo "==> unpacking Slurm into .slurm (once, a few seconds)" >&2
unpacking=$(mktemp -d "$folder/unpacking.XXXXXX")
trap 'rm -rf "$unpacking"' EXIT
# shellcheck source=tools/debian_packages.sh
source tools/debian_packages.sh
unpack_packages "$unpacking" --with-dependencies "${packages[@]}"
mkdir "$unpacking/bin"
for binary in "${binaries[@]}"; do
    for found in "$unpacking/files"/usr/{bin,sbin}/"$binary"{,-wlm}; do
        if [ -x "$found" ]; then break; fi
    done
    # slurmd starts slurmstepd from the folder that it was built for, unless it is told otherwise.
    options=$([ "$binary" != slurmd ] || echo '-d "$here/bin/slurmstepd"')
    cat >"$unpacking/bin/$binary" <<WRAPPER
#!/bin/sh
here=\$(dirname "\$(dirname "\$(readlink -f "\$0")")")
LD_LIBRARY_PATH=\$here/lib:\$here/plugins\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "\$here/${found#"$unpacking/"}" $options "\$@"
WRAPPER
    chmod +x "$unpacking/bin/$binary"
done
plugins=$(cd "$unpacking" && echo files/usr/lib/*/slurm-wlm)
ln -s "$plugins" "$unpacking/plugins"
ln -s "$(dirname "$plugins")" "$unpacking/lib"
for binary in munged slurmctld slurmd; do  # the others want a configuration even for that
    "$unpacking/bin/$binary" -V >/dev/null 2>"$unpacking/refused" ||
        stop "$binary from Debian's package does not run on this machine: $(head -1 "$unpacking/refused"); next step: install Slurm and munge"
done
rm -rf "$folder"/{files,lib,plugins,bin}
mv "$unpacking"/{files,lib,plugins,bin} "$folder"
