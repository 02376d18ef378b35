"""Run llama.cpp's HTTP server from the wheel `xllamacpp`. Runs in that peer's environment, not in Syringa's.

python llamacpp_server.py MODEL PORT SLOTS CONTEXT_PER_SLOT THREADS
"""

import signal
import sys

import xllamacpp

model, port, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = model
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = slots * context
params.cont_batching = True
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
# Defaults: prompt cache on (a slot keeps its last prompt, the slot with the longest common prefix is chosen), automatic
# flash attention, logical batch 2048, physical 512, f16 cache, one cache stream per slot.
params.verbosity = 1  # no line per request, which the other servers do not log either

# The default action of SIGTERM ends its C++ threads; a Python handler would never run.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
server = xllamacpp.Server(params)
signal.pause()
