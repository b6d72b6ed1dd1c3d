"""Tests of GT."""

import os

# Some virtual machines report AMX and do not have it: products of bfloat16 then end the process, with torch alone too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
