# SPDX-License-Identifier: Apache-2.0
"""`EPConfig.max_output_rows`: which rows a rank keeps, and what tokens lack."""
