# Nereus on CPUs: trial runs, planning, replay. Build from the repository root:
#   docker build -f deployments/docker/cpu.Dockerfile -t nereus:cpu --build-arg TORCH_INDEX=URL .
# TORCH_INDEX is a package index with torch's CPU wheels; without it pip's own index may bring GPU libraries.
FROM python:3.11-slim
# The image takes its system's security updates.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends make tini && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nereus
COPY pyproject.toml README.md LICENSE constraints-cpu.txt ./
COPY nereus nereus
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url $TORCH_INDEX} -c constraints-cpu.txt torch \
 && pip install --no-cache-dir -c constraints-cpu.txt .
COPY examples examples
RUN useradd --uid 10001 --create-home nereus && mkdir /runs && chown nereus /runs
USER 10001
WORKDIR /runs
ENTRYPOINT ["tini", "--"]
CMD ["nereus", "doctor"]
