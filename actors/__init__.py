"""The cluster side: hosting, training, sampling and the engines. Imported as `raysessions.actors`."""

if __name__ != "raysessions.actors":
    raise ImportError(
        f"This folder is the package `raysessions.actors`, but was imported as {__name__!r}. A top-level `actors` would "
        "collide with other distributions and with a user's own folder of that name. Write `import raysessions.actors`."
    )
