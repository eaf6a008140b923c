#!/bin/sh
# Builds, tests and measures on a GPU machine that has no network, and writes Markdown.
#
#   tools/gpu_run.sh [--wheels FOLDER] [--limit SECONDS] [STEP...]
#
# FOLDER (build/gpu-wheels) is what `make gpu-wheels` filled on a machine with a network. Steps, in this order, all when
# none is named:
#
#   install   the wheels, into build/gpu-site; what the machine's Python has besides stays in reach
#   build     the compiled modules, in place
#   check     what there is: driver, compiler of kernels, headers, ONNX Runtime's providers
#   test      the tests with the marks `gpu` (without a GPU they fail) and `nvrtc`
#   bench     benchmarks/gpu.py
#
# In $OUT (build/gpu-run) are report.md, and a log of each step. All steps of one call take at most 570 seconds together
# (--limit): what does not fit is named as not run, and a second call with its name goes on from there. The status is
# 0 only when every step passed. PYTHON (python3) is the interpreter, BENCH_ARGS and TEST_ARGS are handed on.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/build/gpu-run}
WHEELS=$PWD/build/gpu-wheels
LIMIT=570
STEPS=
while [ $# -gt 0 ]; do
    case $1 in
    --wheels) WHEELS=$2 && shift ;;
    --limit) LIMIT=$2 && shift ;;
    install | build | check | test | bench) STEPS="$STEPS $1" ;;
    *) echo "expected steps of install, build, check, test and bench, got '$1'" >&2 && exit 2 ;;
    esac
    shift
done
STEPS=${STEPS:-install build check test bench}
SITE=$PWD/build/gpu-site
REPORT=$OUT/report.md
BEGAN=$(date +%s)
STATUS=0
SHOWN=
mkdir -p "$OUT" || exit 2

# before the machine's own packages; pytest's plugins among those are not what the tests were written for
export PYTHONPATH="$SITE:$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 NEPTRIO_REQUIRE_GPU=1
export NEPTRIO_KERNEL_CACHE="${NEPTRIO_KERNEL_CACHE:-$PWD/build/gpu-kernels}"

# run STEP COMMAND...: (the report shows $SHOWN instead, if it is set) within what is left of the time, output to the screen and a log, a line for the report
run() {
    step=$1 && shift
    left=$((LIMIT - $(date +%s) + BEGAN))
    shown=${SHOWN:-$*}
    echo "== $step: $shown"
    from=$(date +%s)
    code=124
    if [ "$left" -gt 0 ]; then
        # no pipe: of a pipe the shell would tell the last program's status
        timeout -k 10 "$left" "$@" >"$OUT/$step.log" 2>&1
        code=$?
    else
        echo "not run: the time was up" >"$OUT/$step.log"
    fi
    tail -n 60 "$OUT/$step.log"
    case $code in
    0) said=passed ;;
    124 | 137) said="not finished: the time ($LIMIT s) was up" ;;
    *) said="failed ($code)" ;;
    esac
    [ "$code" = 0 ] || STATUS=1
    echo "| $step | \`$shown\` | $said | $(($(date +%s) - from)) s |" >>"$OUT/steps"
    return "$code"
}

build() {
    # a wheel of this package comes before the tree: it must be of the same
    if [ -d "$SITE/neptrio" ]; then
        run wheel diff -rq -x "*.so" -x demo_repository -x __pycache__ src/neptrio "$SITE/neptrio" || return 1
    fi
    # without Python's headers nothing can be built; modules that came with the tree may fit
    if ! "$PYTHON" -c "import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"; then
        echo "this Python has no Python.h: compiled modules of a wheel of neptrio, or those of the tree, are used as they are" >"$OUT/notes"
    else
        run build "$PYTHON" setup.py build_ext --inplace || return 1
    fi
    run modules "$PYTHON" -c "import neptrio.execution.batch, neptrio.backends.kernel.cuda_launch as m; print(m.__file__)"
}

check() {
    run check "$PYTHON" tools/gpu_check.py
}

tests() {
    # only files with those marks: others need more packages
    # shellcheck disable=SC2046,SC2086
    run test "$PYTHON" -m pytest -m "gpu or nvrtc" -rA $(grep -rlE --include='test_*.py' '^(pytestmark = \[?| +)pytest\.mark\.(gpu|nvrtc)' tests | sort) ${TEST_ARGS:-}
}

bench() {
    # shellcheck disable=SC2086
    run bench "$PYTHON" -m benchmarks.gpu ${BENCH_ARGS:-}
}

# what one call has found, even if it is ended in the middle
report() {
    {
        echo "# A run on a GPU machine"
        echo
        "$PYTHON" -c "import platform; print(f'Python {platform.python_version()}, {platform.platform()}')" 2>&1
        # only what answers at once: a driver in trouble may not
        timeout 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
            echo "nvidia-smi tells nothing here."
        git rev-parse --short HEAD 2>/dev/null | sed 's/^/Commit /'
        [ ! -f "$OUT/notes" ] || cat "$OUT/notes"
        echo
        echo "| step | command | outcome | took |"
        echo "|---|---|---|---|"
        cat "$OUT/steps" 2>/dev/null
        for step in check bench; do
            [ -f "$OUT/$step.log" ] && echo && cat "$OUT/$step.log"
        done
        for step in install wheel build modules test; do
            [ -f "$OUT/$step.log" ] || continue
            printf '\n## Output of %s\n\n```\n' "$step"
            tail -n 200 "$OUT/$step.log"
            echo '```'
        done
    } >"$REPORT"
}

rm -f "$OUT/steps" "$OUT/notes"
for step in install wheel build modules check test bench; do rm -f "$OUT/$step.log"; done
for step in $STEPS; do
    ok=0
    case $step in
    install)
        rm -rf "$SITE"
        flags="-m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir"
        SHOWN="$PYTHON $flags --target $SITE $WHEELS/*.whl"
        # shellcheck disable=SC2086
        run install "$PYTHON" $flags --target "$SITE" "$WHEELS"/*.whl || ok=1
        SHOWN=
        ;;
    build) build || ok=1 ;;
    check) check || true ;;
    test) tests || true ;;
    bench) bench || true ;;
    esac
    report
    # nothing of what follows could pass
    [ "$ok" = 0 ] || break
done
rm -f "$OUT/steps" "$OUT/notes"
echo "== the report is $REPORT"
exit "$STATUS"
