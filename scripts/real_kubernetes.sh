#!/usr/bin/env bash
# Build kube-apiserver, kube-scheduler and kube-controller-manager from Debian's source package `kubernetes`, for tests/kubernetes_real.
#
#   scripts/real_kubernetes.sh FOLDER        # then: SKYSERVE_KUBE_BIN=FOLDER .venv/bin/pytest -n0 tests/kubernetes_real
#
# Needs root or the packages golang-go, dpkg-dev and etcd-server, and a deb-src line for apt. A quarter of an hour at the lowest priority
# of two busy cores; 1.2 GB of disk in FOLDER/build, which may be removed afterwards. What is there already stays.
set -euo pipefail
folder=$(mkdir -p "${1:?the folder for the programs}" && cd "$1" && pwd)
programs=(kube-apiserver kube-scheduler kube-controller-manager)

install_tools() {
  local missing=()
  command -v go >/dev/null || missing+=(golang-go)
  command -v dpkg-source >/dev/null || missing+=(dpkg-dev)
  if ! command -v etcd >/dev/null; then
    apt-cache show etcd-server >/dev/null 2>&1 && missing+=(etcd-server) || missing+=(etcd)
  fi
  [ "${#missing[@]}" = 0 ] || apt-get install -y -qq "${missing[@]}"
}

# The source has to be where GOPATH mode looks for it: its packages import each other by that path.
unpack() {
  local place=$folder/build/gopath/src/k8s.io
  [ ! -e "$place/kubernetes" ] || return 0
  mkdir -p "$place" "$folder/build/source"
  (cd "$folder/build/source" && apt-get source --quiet kubernetes)
  mv "$folder"/build/source/kubernetes-*/ "$place/kubernetes"
}

# Source packages leave out what is generated. The API server does not compile without the description of its own API.
generate() {
  local out=pkg/generated/openapi annotated
  [ ! -e "$out/zz_generated.openapi.go" ] || return 0
  go build -o "$folder/build/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  annotated=$(grep -Rl --include='*.go' -e '+k8s:openapi-gen=' pkg vendor/k8s.io |
    grep -v -e '^vendor/k8s.io/code-generator/' -e '^vendor/k8s.io/sample-' -e zz_generated -e /testdata/ |
    xargs -n1 dirname | sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
  "$folder/build/openapi-gen" -O zz_generated.openapi -h hack/boilerplate/boilerplate.go.txt -i "$annotated" \
    -p k8s.io/kubernetes/$out -r "$folder/build/violations"
}

# From 1.18 on Go passes the state of an iteration over a map in. The package of that time crashes the API server at the first JSON of a
# map in an `interface{}`, as the patch of a mutating webhook is one.
fix_iteration() {
  cd vendor/github.com/modern-go/reflect2
  if [ ! -e iterated.go ] && grep -q 'm unsafe.Pointer) \*hiter' unsafe_link.go; then
    sed -i -e 's/m unsafe.Pointer) \*hiter/m unsafe.Pointer, it *hiter)/' \
      -e 's|// rest fields are ignored|rest [6]unsafe.Pointer; more [6]uintptr|' unsafe_link.go
    sed -i 's/hiter: *mapiterinit(/hiter: iterated(/' unsafe_map.go
    printf '%s\n' 'package reflect2' 'import "unsafe"' 'func iterated(rtype unsafe.Pointer, m unsafe.Pointer) *hiter {' \
      'it := new(hiter)' 'mapiterinit(rtype, m, it)' 'return it' '}' >iterated.go
  fi
  cd - >/dev/null
}

# The version that the programs report: that of the package, of which 1.20.5+really1.20.2-1.1 is 1.20.2.
release() {
  dpkg-parsechangelog --show-field Version | sed -e 's/-[^-]*$//' -e 's/.*really//' -e 's/+.*//'
}

build() {
  local version flags="-s -w" package each
  version=$(release)
  for package in component-base/version client-go/pkg/version; do
    package=k8s.io/kubernetes/vendor/k8s.io/$package
    flags+=" -X $package.gitVersion=v$version -X $package.gitMajor=${version%%.*}"
    flags+=" -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
  done
  for each in "${programs[@]}"; do
    [ -x "$folder/$each" ] || go build -tags providerless,dockerless -ldflags "$flags" -o "$folder/$each" "./cmd/$each"
    "$folder/$each" --version
  done
}

install_tools
unpack
cd "$folder/build/gopath/src/k8s.io/kubernetes"
export GO111MODULE=off GOPATH=$folder/build/gopath GOCACHE=$folder/build/cache GOFLAGS=-p=2 GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0
generate
fix_iteration
build
