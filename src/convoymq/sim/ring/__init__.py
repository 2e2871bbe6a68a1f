"""The load `ring`: guaranteed multicast on simulated nodes."""
