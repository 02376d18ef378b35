"""llama.cpp's own HTTP server, out of the wheel `xllamacpp`. Runs in that peer's environment, not in ours.

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
# Left as they come: prompt cache on (a slot keeps its last prompt, and the slot with the longest common prefix is
# chosen), flash attention automatic, logical batch 2048, physical 512, f16 cache, one cache stream per slot.
params.verbosity = 1  # a line per request would be work that the others do not do

# Its threads are C++: the default action of SIGTERM ends them, a Python handler would never get to run.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
server = xllamacpp.Server(params)
signal.pause()
