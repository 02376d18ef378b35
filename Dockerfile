# Syringa for CPUs. docs/docker.md has the commands.
#
# BASE_IMAGE is any Debian-like image with Python 3.11 or newer and its venv module.
ARG BASE_IMAGE=python:3.11-slim-bookworm


# The wheel: compiled kernels for every supported instruction set, not for the building machine alone.
FROM ${BASE_IMAGE} AS wheel
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build
WORKDIR /src
COPY LICENSE README.md pyproject.toml setup.py ./
COPY build_tools build_tools
COPY syringa syringa
RUN SYRINGA_PORTABLE_BUILD=1 /opt/build/bin/pip wheel --no-deps --wheel-dir /wheels .


# The virtual environment. PyTorch, most of the image, has a layer of its own, which source changes do not rebuild.
FROM ${BASE_IMAGE} AS install
# Where pip looks for packages; empty: pip's defaults. Those have PyTorch with several GB of CUDA libraries:
# PIP_EXTRA_INDEX_URL names an index that has its CPU build.
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
# Optional dependencies, separated by commas: postgres, models, mcp (see pyproject.toml).
ARG EXTRAS=postgres
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/syringa
COPY constraints.txt /src/
# Without the parts of PyTorch that are only there to compile and to test extensions of it.
RUN /opt/syringa/bin/pip install -c /src/constraints.txt torch \
    && rm -r /opt/syringa/lib/python3*/site-packages/torch/include /opt/syringa/lib/python3*/site-packages/torch/test
COPY --from=wheel /wheels /wheels
RUN /opt/syringa/bin/pip install -c /src/constraints.txt "$(echo /wheels/syringa-*.whl)[${EXTRAS}]"


FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --user-group --home-dir /data --create-home --shell /usr/sbin/nologin syringa
COPY --from=install /opt/syringa /opt/syringa
# /data has the models (models/), the database (syringa.db) and, if there is one, the settings file (syringa.toml).
ENV PATH=/opt/syringa/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SYRINGA_HOST=0.0.0.0 \
    SYRINGA_PORT=8000 \
    SYRINGA_HOME=/data \
    SYRINGA_DATABASE=/data/syringa.db \
    HF_HOME=/data/huggingface
USER syringa
WORKDIR /data
VOLUME /data
EXPOSE 8000
# The first start fetches the default model, and large models take a while to load.
HEALTHCHECK --interval=15s --timeout=5s --start-period=5m --retries=3 \
    CMD python3 -c "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['SYRINGA_PORT'] + '/health', timeout=4)"
ENTRYPOINT ["syringa"]
CMD ["serve"]
