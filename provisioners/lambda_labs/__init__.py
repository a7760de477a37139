"""Lambda's on-demand instances (https://docs.lambda.ai/api/cloud)."""
