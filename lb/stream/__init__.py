"""The content of requests to models and of their streams: prompts, token usage, transcripts, and how a broken stream resumes.

Pure: bytes and JSON in, values out.
"""
