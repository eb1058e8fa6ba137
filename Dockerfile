# This repository at /gemsmith with the environment of `make env`:   make image DEVICE=cuda   or   make image DEVICE=cpu
#
# CUDA comes with PyTorch's packages; the host needs NVIDIA's driver and container toolkit. To run:
#   docker run --rm --gpus all --shm-size 16g -v $PWD/runs:/runs IMAGE gemsmith train +experiment=quickstart runtime.run_dir=/runs/a
FROM python:3.11-slim-bookworm

# A C++ compiler is what Triton, torch.compile and exports call; make and git are what the Makefile and W&B call.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ git make openssh-client \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home gemsmith \
 && install --directory --owner gemsmith /gemsmith /runs
USER gemsmith
WORKDIR /gemsmith

# What the environment depends on, so that other changes leave its layer, which is by far the largest, as it is.
ARG DEVICE=cpu
COPY --chown=gemsmith Makefile pyproject.toml README.md LICENSE ./
COPY --chown=gemsmith requirements requirements
COPY --chown=gemsmith tools/__init__.py tools/wheel.py tools/
COPY --chown=gemsmith kernels/__init__.py kernels/
COPY --chown=gemsmith launch/__init__.py launch/
COPY --chown=gemsmith modules/__init__.py modules/
COPY --chown=gemsmith train/__init__.py train/
RUN make env DEVICE=${DEVICE} && rm -rf /home/gemsmith/.cache

COPY --chown=gemsmith . .
ENV PATH=/gemsmith/.venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["gemsmith", "doctor"]
