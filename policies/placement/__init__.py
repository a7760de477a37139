"""Which zone and capacity type: one placer per file behind `base.PlacementPolicy`."""
