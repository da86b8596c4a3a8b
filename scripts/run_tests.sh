#!/usr/bin/env bash
# Run pytest with the given arguments. Some tests depend on time, and a busy machine may disturb them:
# up to five that fail are run once more, with nothing beside them, and named even if they pass then.
# usage: run_tests.sh PYTHON [ARGUMENT...]
set -uo pipefail
python=$1
shift
most=5

"$python" -m pytest --cache-clear "$@"
code=$?
[ "$code" -eq 1 ] || exit "$code"  # 1: some tests failed; anything else is no test's failure

failed=.pytest_cache/v/cache/lastfailed
count=$("$python" -c "import json, sys; print(len(json.load(open(sys.argv[1]))))" "$failed") || exit 1
if [ "$count" -gt "$most" ]; then
    echo "$count tests failed: more than a busy machine explains, so they are not run again"
    exit 1
fi
echo "== Failed, and run once more with nothing beside them:"
"$python" -c "import json, sys; print(*json.load(open(sys.argv[1])), sep='\n')" "$failed"
exec "$python" -m pytest "$@" -n 0 --last-failed --last-failed-no-failures none
