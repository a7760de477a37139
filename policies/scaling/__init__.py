"""How many replicas: one scaler per file behind `base.Scaler`."""
