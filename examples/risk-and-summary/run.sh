#!/bin/sh
# Usage: run.sh [URL]      MINUTES=4 TRIALS=3 RISK=0.8 SUMMARY=0.3 (requests/s) OUT=runs/risk-and-summary
set -eu
here=$(dirname "$0")
python "$here/trace.py" "${TRACE:-risk-and-summary.parquet}" --minutes "${MINUTES:-4}" \
  --risk "${RISK:-0.8}" --summary "${SUMMARY:-0.3}"
exec python -m replay isolate "${TRACE:-risk-and-summary.parquet}" --poisson --tenants "$here/tenants.toml" \
  --trials "${TRIALS:-3}" --out "${OUT:-runs/risk-and-summary}" ${1:+--target "$1"}
