# SPDX-License-Identifier: Apache-2.0
"""A model of the wire protocols, explored without a GPU; see `docs/model.md`."""
