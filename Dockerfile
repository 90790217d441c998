# Two images from one file: `api`, which carries no torch, and `worker`. docker-compose.yml builds both.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/rocket
ENV PATH=/opt/rocket/bin:$PATH
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY app app
COPY migrations migrations
COPY rocket_client rocket_client
COPY rocket_core rocket_core
COPY worker worker

FROM source AS api-packages
RUN pip install -c constraints.txt '.[s3]'

FROM source AS worker-packages
# An index of torch builds other than the usual one, which has those for GPUs (they compute on processors, too, and are
# gigabytes larger). Torch alone comes from there; what it needs comes from the usual index with everything else.
ARG TORCH_INDEX=
RUN pip install --no-deps -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN pip install -c constraints.txt '.[worker,s3,vision,evaluation]'

FROM python:${PYTHON_VERSION}-slim AS runtime
ENV PATH=/opt/rocket/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN groupadd --gid 10001 rocket \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rocket \
    # A new volume takes its owner from the folder that it is mounted on.
    && install --directory --owner=10001 --group=10001 /data /models /datasets
WORKDIR /data
USER 10001:10001

FROM runtime AS api
COPY --from=api-packages /opt/rocket /opt/rocket
CMD ["rocket", "api", "--host", "0.0.0.0"]

FROM runtime AS worker
COPY --from=worker-packages /opt/rocket /opt/rocket
CMD ["rocket", "worker"]
