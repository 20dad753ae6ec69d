"""One file per transport behind the one pull protocol in `base`."""
