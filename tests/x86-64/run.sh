#!/usr/bin/env bash
# Runs the unit tests of the CPU backend on an emulated processor with AVX-512, VNNI, BF16 and AVX-VNNI: Linux in Bochs, with the
# tests in its initramfs. Their output arrives through the serial port.
#
# QEMU emulates none of these instructions. Bochs 3.0 also has AMX, but not the register IA32_XFD, without which Linux enables no
# AMX, so the emulated processor has none.
#
#     tests/x86-64/run.sh TEST_BINARY [ARGUMENT...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tests=$1
shift
work=$PWD/target/ci-bochs
system=$work/system

# The emulator and the kernel come from Debian 13. They are unpacked, not installed.
if [ ! -e "$system/usr/bin/bochs-bin" ]; then
    rm -rf "$system"
    mkdir -p "$work"
    mmdebstrap --quiet --mode=root --variant=extract \
        --include=bochs,bochsbios,vgabios,isolinux,syslinux-common,linux-image-cloud-amd64 \
        trixie "$system"
fi

# The initramfs: busybox, the tests and the libraries that they load.
root=$work/root disc=$work/disc
rm -rf "$root" "$disc"
mkdir -p "$root"/{bin,proc,sys,dev,tmp} "$disc"
cp "$(command -v busybox)" "$root/bin/busybox"
strip -o "$root/bin/tests" "$tests"
ldd "$tests" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
printf '%q ' /bin/tests "$@" > "$root/command"
cp tests/x86-64/init "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc 2> /dev/null) > "$disc/initrd"
cp "$system"/boot/vmlinuz-* "$disc/vmlinuz"
cp "$system/usr/lib/ISOLINUX/isolinux.bin" "$system/usr/lib/syslinux/modules/bios/ldlinux.c32" tests/x86-64/isolinux.cfg "$disc"
xorriso -as mkisofs -quiet -o "$work/disc.iso" -b isolinux.bin -c boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$disc" 2> "$work/xorriso.log"

# The display needs a network and nobody to look at it. The build of Debian is a debugger, which is told to continue.
sed -e "s|@SYSTEM@|$system|; s|@WORK@|$work|g" tests/x86-64/bochsrc > "$work/bochsrc"
: > "$work/serial.log"
emulator=(timeout 7200 unshare --map-root-user --net "$system/lib64/ld-linux-x86-64.so.2"
    --library-path "$system/usr/lib/x86_64-linux-gnu" "$system/usr/bin/bochs-bin" -q -f "$work/bochsrc")
export LTDL_LIBRARY_PATH=$system/usr/lib/x86_64-linux-gnu/bochs/plugins BXSHARE=$system/usr/share/bochs
# The emulator ends with an error when the machine resets.
echo c | "${emulator[@]}" > "$work/bochs.out" 2>&1 || true
tr -d '\r' < "$work/serial.log" | sed -n '/^processor:/,$p'
grep -q '^tests: 0' <(tr -d '\r' < "$work/serial.log") || {
    echo "the tests failed or did not end; the emulator's log is $work/bochs.log" >&2
    exit 1
}
