#!/usr/bin/env bash
# Builds what is released for this machine's architecture: the wheel, the tarball, the debug symbols and SHA256SUMS.
#
#   deploy/release/build.sh [--output DIR] [--binary FILE]
#
# DIR is target/packages unless specified; it is emptied first. With FILE, that binary is packaged and the profile `dist` is not
# compiled: use it to try this script, not for a release.
# Needs Rust, a C compiler, binutils and the packages of deploy/release/requirements.txt, in PATH or beside $PYTHON.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/../.."
export LC_ALL=C

output=target/packages
given=
while [ $# -gt 0 ]; do
    case $1 in
        --output) output=${2:?--output needs a value}; shift 2 ;;
        --binary) given=${2:?--binary needs a value}; shift 2 ;;
        *) echo "unknown argument: $1" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH

target=$(rustc -vV | sed -n 's/^host: //p')
cargo_home=${CARGO_HOME:-$HOME/.cargo}
revision=${VCS_REVISION:-$(git rev-parse HEAD 2> /dev/null || echo unknown)}
# The time of the files in the packages.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() {
    # Panic messages and debug info name source files, without the folders of this machine.
    local remapped="--remap-path-prefix=$cargo_home/registry/src=/cargo --remap-path-prefix=$PWD=/octavo"
    # Where the sources of the standard library are installed, their folder takes the place of this name.
    local compiler sysroot
    compiler=$(rustc -vV | sed -n 's/^commit-hash: //p')
    sysroot=$(rustc --print sysroot)
    remapped+=" --remap-path-prefix=$sysroot/lib/rustlib/src/rust=/rustc/$compiler"
    RUSTFLAGS="${RUSTFLAGS:-} $remapped" cargo build --locked --profile dist --bin octavo >&2
    echo "${CARGO_TARGET_DIR:-target}/dist/octavo"
}

# Moves what only a debugger needs into a file of its own. A debugger, and a panic's backtrace, find it beside the binary.
split_debug_info() {
    objcopy --only-keep-debug --compress-debug-sections=zlib "$1" "$3"
    strip --strip-all -o "$2" "$1"
    (cd "$(dirname "$3")" && objcopy --add-gnu-debuglink="$(basename "$3")" "$2")
    chmod 0755 "$2"
    chmod 0644 "$3"
}

names_no_folder_of_this_machine() {
    local folder
    for folder in "$PWD" "$cargo_home" "$HOME" "$work"; do
        if [ "$folder" != / ] && grep --quiet --text --fixed-strings "$folder/" "$1"; then
            echo "the binary names $folder" >&2
            return 1
        fi
    done
}

# A wheel of the metadata that maturin reads from pyproject.toml, for the C library that auditwheel says the binary needs.
wheel_of() {
    local root=$work/wheel info file tag
    mkdir -p "$root"
    maturin pep517 write-dist-info --metadata-directory "$root" > /dev/null
    info=$root/octavo-$version.dist-info
    for file in THIRD-PARTY-LICENSES.txt RUST-STANDARD-LIBRARY-LICENSES.html; do
        cp "$work/$file" "$info/licenses/"
        sed -i "0,/^License-File: /s//License-File: $file\n&/" "$info/METADATA"
    done
    install -D -m 0644 "$work/octavo.cdx.json" "$info/sboms/octavo.cdx.json"
    install -D -m 0755 "$1" "$root/octavo-$version.data/scripts/octavo"
    install -D -m 0644 -t "$root/octavo" deploy/release/python/octavo/*.py
    wheel pack --dest-dir "$work" "$root" > /dev/null
    tag=$(auditwheel show --json "$work"/octavo-*.whl |
        "$python" -c 'import json, sys; print(json.load(sys.stdin)["overall_tag"])')
    (cd "$work" && wheel tags --remove --platform-tag "$tag" octavo-*.whl > /dev/null)
    mv "$work"/octavo-*.whl "$output/"
}

tarball_of() {
    local folder=$work/$name
    mkdir "$folder"
    cp "$1" LICENSE README.md "$work"/{THIRD-PARTY-LICENSES.txt,RUST-STANDARD-LIBRARY-LICENSES.html,octavo.cdx.json} "$folder/"
    if "$1" completions --help > /dev/null 2>&1; then
        mkdir "$folder/completions"
        "$1" completions bash > "$folder/completions/octavo.bash"
        "$1" completions fish > "$folder/completions/octavo.fish"
        "$1" completions zsh > "$folder/completions/_octavo"
    fi
    chmod -R u=rwX,go=rX "$folder"
    tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" "$name" |
        gzip --no-name --best > "$output/$name.tar.gz"
}

rm -rf "$output"
mkdir -p "$output"
output=$(cd "$output" && pwd)
version=$(cargo pkgid --package octavo | sed 's/.*[@#]//')
name=octavo-$version-$target

"$python" deploy/release/bill.py --target "$target" --revision "$revision" \
    --sbom "$work/octavo.cdx.json" --licenses "$work/THIRD-PARTY-LICENSES.txt"
cp "$(rustc --print sysroot)/share/doc/rust/COPYRIGHT-library.html" "$work/RUST-STANDARD-LIBRARY-LICENSES.html"
built=${given:-$(compile)}
split_debug_info "$built" "$work/octavo" "$output/$name.debug"
[ -n "$given" ] || names_no_folder_of_this_machine "$work/octavo"
wheel_of "$work/octavo"
tarball_of "$work/octavo"
cp "$work/octavo.cdx.json" "$output/$name.cdx.json"
(cd "$output" && sha256sum -- * > "$work/SHA256SUMS" && mv "$work/SHA256SUMS" . && wc --bytes -- *)
