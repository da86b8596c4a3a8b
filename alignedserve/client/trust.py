"""Which servers our own clients believe: those of known authorities, and of one's own that ALIGNEDSERVE_CA names."""

import ssl

from alignedserve.config.environment import AUTHORITY_VARIABLE, authority_path
from alignedserve.core.errors import ConfigError


def trust_for(url: str) -> ssl.SSLContext | None:
    """Return the TLS settings for a server; None: its address is not of https. Raises ConfigError.

    Known are the system's authorities (or those of SSL_CERT_FILE and SSL_CERT_DIR, which OpenSSL reads), and those in
    the file that ALIGNEDSERVE_CA names.
    """
    if not url.startswith("https://"):
        return None
    context, path = ssl.create_default_context(), authority_path()
    if path is not None:
        try:
            context.load_verify_locations(path)
        except OSError as error:  # SSLError is one
            reason = "holds no certificates in PEM" if isinstance(error, ssl.SSLError) else "cannot be read"
            raise ConfigError(f"{AUTHORITY_VARIABLE} names {path}, which {reason}") from error
    return context


def untrusted(url: str, error: BaseException | None) -> str | None:
    """Return what to do about a connection that failed for its certificate or for want of TLS; None: another reason."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # aiohttp's own errors are of these classes as well, and have nothing of what they say.
        reason = getattr(error, "verify_message", None) or getattr(error, "reason", None)
        if isinstance(error, ssl.SSLCertVerificationError) and reason:
            return (
                f"the certificate of {url} is not trusted ({reason.rstrip('.')}); "
                f"set {AUTHORITY_VARIABLE} to the file of the authority that has signed it"
            )
        if isinstance(error, ssl.SSLError) and reason:
            return f"{url} does not answer with TLS ({reason}); its address may begin with http://"
        error = error.__cause__ or error.__context__
    return None
