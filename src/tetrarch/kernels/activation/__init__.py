# SPDX-License-Identifier: Apache-2.0
"""The nonlinearity between an expert's two GEMMs."""
