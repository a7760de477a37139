"""Your own hosts as a cloud: `pool` is what the configuration says, `machines` what is taken of it, asked over SSH."""
