# An image that serves on a CPU, or with `--build-arg VARIANT=cuda` on NVIDIA GPUs. docs/install.md has the commands.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG VARIANT=cpu
# For the native kernels alone; the image that serves has no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/alignedserve
ENV PATH=/opt/alignedserve/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Large and rarely changed: each in a layer of its own. PyPI's PyTorch for x86 brings CUDA 13 and Triton along, and asks
# for a driver of 580 or newer.
COPY constraints.txt ./
RUN torch=$(grep '^torch==' constraints.txt) && case "$VARIANT" in \
        cpu) pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu \
            --extra-index-url https://pypi.org/simple "$torch" ;; \
        cuda) pip install -c constraints.txt "$torch" ;; \
        *) echo "VARIANT is cpu or cuda, not $VARIANT" >&2; exit 1 ;; \
    esac
COPY pyproject.toml ./
# With the extras for pictures and tokens; for GPUs the extra for them too.
RUN python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; print(*project["dependencies"], *extras["vision"], *extras["jwt"], *extras.get(sys.argv[1], ()), sep="\n")' \
        "$(test "$VARIANT" != cuda || echo gpu)" > /tmp/needed.txt && pip install -c constraints.txt -r /tmp/needed.txt
COPY setup.py MANIFEST.in README.md LICENSE NOTICE ./
COPY alignedserve alignedserve
COPY router router
COPY kvpool kvpool
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY kernels kernels
COPY plugins plugins
# The kernels are optional elsewhere; here a build without them is a mistake.
RUN pip install -c constraints.txt --no-deps . && cd / && python -c 'import torch, kernels._native'

FROM python:${PYTHON}-slim-bookworm
ARG VARIANT=cpu
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="AlignedServe" \
    org.opencontainers.image.description="Serves real-time chat and best-effort documents from one fleet" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}-${VARIANT}" \
    org.opencontainers.image.revision="${REVISION}"
# libgomp: gateways and routers use the kernels without PyTorch, which has its own. A GPU's kernels are compiled where
# they run.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 \
        $(test "$VARIANT" != cuda || echo gcc libc6-dev) && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home alignedserve \
    && install -d -m 0700 -o alignedserve -g alignedserve /run/alignedserve /var/lib/alignedserve
COPY --from=build /opt/alignedserve /opt/alignedserve
ENV PATH=/opt/alignedserve/bin:$PATH PYTHONUNBUFFERED=1 \
    ALIGNEDSERVE_RUN_DIR=/run/alignedserve ALIGNEDSERVE_STATE_DIR=/var/lib/alignedserve \
    HF_HOME=/var/lib/alignedserve/huggingface
USER alignedserve
WORKDIR /home/alignedserve
VOLUME /var/lib/alignedserve
EXPOSE 8000
# /health is 200 also while the gateway drains: what is open is still answered. With a certificate it is HTTPS alone.
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import ssl, urllib.request as u\nask = u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context())).open\ntry:\n    ask('http://127.0.0.1:8000/health', timeout=2)\nexcept OSError:\n    ask('https://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["alignedserve"]
# All addresses of the container; who may reach them is said where its ports are published.
CMD ["serve", "pocket", "--set", "gateway.host=0.0.0.0"]
