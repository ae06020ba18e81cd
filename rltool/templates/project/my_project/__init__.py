"""An environment and a network, trained by rltool."""
