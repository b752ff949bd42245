"""HTTP in front of live sessions: OpenAI's API to sample from them, Tinker's to train. A Ray Serve application (`raysessions
serve`); needs the extra `raysessions[gateway]`."""
