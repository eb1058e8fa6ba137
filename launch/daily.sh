#!/usr/bin/env bash
# Train on new files from the newest finished run:   RUN_DIR=runs/daily/2026-11-02 launch/daily.sh data=shop "data.files=[...]"
#
#   RUN_DIR  this run's folder. Those beside it are the earlier runs; the last by name that has finished is continued. Names
#            must therefore sort by time, as dates do. Without one the run begins anew.
#
# Weights, moments and vocabularies are taken over (docs/training.md, "Going on with new data"), for an `events` source. Started
# again with the same RUN_DIR, a run resumes, and one that has finished does nothing. Other variables: launch/torchrun.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -n ${RUN_DIR:-} ]] || { echo "launch/daily.sh: RUN_DIR is not set; e.g. RUN_DIR=runs/daily/$(date -u +%F)" >&2; exit 2; }
mkdir -p "$RUN_DIR"
RUN_DIR=$(cd "$RUN_DIR" && pwd)
export RUN_DIR

if [[ -e $RUN_DIR/results.json ]]; then
  echo "$RUN_DIR has finished already"
  exit 0
fi
before=
for results in "$(dirname "$RUN_DIR")"/*/results.json; do  # in the order of names
  folder=$(dirname "$results")
  if [[ -e $results && $folder < $RUN_DIR ]]; then before=$folder; fi
done
if [[ -n $before ]]; then
  echo "going on from $before"
  set -- "$@" "checkpoint.load='$before'" checkpoint.load_what=optimizer "data.vocabulary_of='$before'"
fi
exec "$root/launch/torchrun.sh" "$@"
