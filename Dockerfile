# Two images from one file: `api`, which carries no torch, and `worker`. docker-compose.yml builds both.
#
# Everything that is downloaded is checked against a hash in requirements/. `make pin-images` pins this image by digest.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY requirements requirements
RUN pip install --require-hashes --no-deps --only-binary :all: -r requirements/build.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY app app
COPY migrations migrations
COPY rocket_cli rocket_cli
COPY rocket_client rocket_client
COPY rocket_core rocket_core
COPY worker worker
RUN pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /dist .

FROM ${PYTHON_IMAGE} AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The images need no pip: that of this stage installs into the environment.
RUN python -m venv --without-pip /opt/rocket
COPY requirements requirements

FROM packages AS api-packages
RUN pip --python /opt/rocket install --require-hashes --no-deps --only-binary :all: -r requirements/api.txt
COPY --from=build /dist /dist
RUN pip --python /opt/rocket install --no-deps --no-index /dist/*.whl

FROM packages AS worker-packages
# An index of torch builds other than the usual one, which has those for GPUs (they compute on processors, too, and are
# gigabytes larger). Its files have other hashes: `make lock-torch` writes them to a file, which TORCH_LOCK names.
ARG TORCH_INDEX=
ARG TORCH_LOCK=torch.txt
RUN pip --python /opt/rocket install --require-hashes --no-deps --only-binary :all: ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "requirements/$TORCH_LOCK"
# A few packages are published as source only, and are built with the setuptools of the lock.
RUN pip --python /opt/rocket install --require-hashes --no-deps --only-binary :all: -r requirements/build.txt
RUN pip --python /opt/rocket install --require-hashes --no-deps --no-build-isolation -r requirements/worker.txt
COPY --from=build /dist /dist
RUN pip --python /opt/rocket install --no-deps --no-index /dist/*.whl

FROM ${PYTHON_IMAGE} AS runtime
ENV PATH=/opt/rocket/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN groupadd --gid 10001 rocket \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rocket \
    # The processes of jobs that read models; see docker-compose.yml.
    && groupadd --gid 10002 rocket-compute \
    && useradd --uid 10002 --gid 10002 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin rocket-compute \
    # A new volume takes its owner from the folder that it is mounted on.
    && install --directory --owner=10001 --group=10001 /data /models /datasets \
    # Nothing here becomes another user, and nothing is installed later.
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && python -m pip uninstall --yes --root-user-action=ignore pip
WORKDIR /data
USER 10001:10001

FROM runtime AS api
COPY --from=api-packages /opt/rocket /opt/rocket
CMD ["rocket", "api", "--host", "0.0.0.0"]

FROM runtime AS worker
COPY --from=worker-packages /opt/rocket /opt/rocket
CMD ["rocket", "worker"]
