# Nereus on NVIDIA GPUs. Build from the repository root:
#   docker build -f deployments/docker/cuda.Dockerfile -t nereus:cuda .
# Not run by us on a GPU yet; the CPU image of the same recipe is what the tests exercise.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
# The image takes its system's security updates.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev tini \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /opt/nereus
COPY pyproject.toml README.md LICENSE ./
COPY nereus nereus
RUN pip install --no-cache-dir . triton
COPY examples examples
RUN useradd --uid 10001 --create-home nereus && mkdir /runs && chown nereus /runs
USER 10001
WORKDIR /runs
ENTRYPOINT ["tini", "--"]
CMD ["nereus", "doctor"]
