#!/usr/bin/env bash
# What these tests run beside Python: Prometheus with promtool, Alertmanager with amtool, node-exporter and nginx.
set -euo pipefail
packages=(prometheus prometheus-alertmanager prometheus-node-exporter nginx-light)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit
# The tests start these programs themselves, on ports of their own: no service shall take the usual ones.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
