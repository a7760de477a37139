"""What commands say that start known engines: their port, model and GPUs, and the service file that serves the same.

`serve init` writes such files, and `serve validate`, `plan` and `up` print what does not fit together as warnings. The controller
imports nothing of this package.
"""
