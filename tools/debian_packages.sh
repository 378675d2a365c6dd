# shellcheck shell=bash
# To be sourced: fetches Debian packages with apt and unpacks them into a folder. Nothing is installed, no service starts,
# no root is needed, and the machine's package lists stay as they are.

# unpack_packages FOLDER [--with-dependencies] PACKAGE…
# Unpacks into FOLDER/files, with --with-dependencies also the dependencies that this machine lacks. Prints the next step and
# fails if apt cannot download them.
unpack_packages() {
    local folder=$1 dependencies= own=()
    shift
    if [ "$1" = --with-dependencies ]; then dependencies=yes; shift; fi
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
        echo "error: there is no apt to get $* with; next step: install them by hand, and run this again" >&2
        return 1
    }
    mkdir -p "$folder/debs"
    if ! _download >/dev/null 2>"$folder/refused" "$@"; then
        # No package lists, or old ones: fresh lists of our own.
        mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
        own=(-o Dir::State::lists="$folder/lists" -o Dir::Cache="$folder/cache")
        _apt_get update >/dev/null && _download "$@" >/dev/null || {
            echo "error: apt could not download $* (see above, and first: $(head -1 "$folder/refused")); next step: check the network and the machine's apt sources, and run this again" >&2
            return 1
        }
    fi
    local package
    for package in "$folder"/debs/*.deb; do dpkg-deb -x "$package" "$folder/files" || return 1; done
}

# The sandbox user of apt may not be allowed to write below the folder.
_apt_get() { (cd "$folder/debs" && apt-get -qq -o APT::Sandbox::User="$(id -un)" "${own[@]}" "$@"); }

_download() {
    local plan=
    if [ -n "$dependencies" ]; then
        plan=$(_apt_get --simulate install --no-install-recommends "$@") || return 1
    fi
    # A package that is installed is downloaded nevertheless: its programs may be incomplete here.
    # shellcheck disable=SC2046
    _apt_get download $({ awk '$1 == "Inst" { print $2 }' <<<"$plan"; printf '%s\n' "$@"; } | sort -u)
}
