"""Calibration: data, inputs, Gram matrices and sensitivities."""
