"""How many replicas: one scaler per file behind `base.Scaler`, and in `hysteresis` when a load becomes a size."""
