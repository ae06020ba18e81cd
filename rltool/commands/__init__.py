"""The commands of ``rltool``, one module each, with a ``main(options) -> exit code``."""
