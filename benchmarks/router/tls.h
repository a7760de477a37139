/* TLS for the mock engine and the load generator: their connections by descriptor, with TLS or without. The programs are
 * linked with OpenSSL where its headers are found (WITH_TLS); then the one accepts either kind on a port, by a connection's
 * first byte, and the other begins the kind that its options say. Certificates are not checked: that is the proxy's part. */
#ifndef TLS_H
#define TLS_H

#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINKS = 65536 };

#ifdef WITH_TLS
#include <openssl/ssl.h>

static SSL_CTX *tls_context;
static SSL *links[LINKS]; /* by descriptor; NULL: plain */

static inline void tls_setup(const SSL_METHOD *method) {
    tls_context = SSL_CTX_new(method);
    if (!tls_context) fail("SSL_CTX_new");
    SSL_CTX_set_mode(tls_context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_options(tls_context, SSL_OP_IGNORE_UNEXPECTED_EOF);
}

static inline void tls_serve(const char *certificate, const char *key) {
    tls_setup(TLS_server_method());
    if (SSL_CTX_use_certificate_chain_file(tls_context, certificate) != 1 ||
        SSL_CTX_use_PrivateKey_file(tls_context, key, SSL_FILETYPE_PEM) != 1)
        fail("the certificate cannot be read");
    SSL_CTX_set_num_tickets(tls_context, 0); /* as the program in front of our replicas: no session is resumed */
}

static inline void tls_request(void) { tls_setup(TLS_client_method()); }

static inline SSL *tls_link(int fd) {
    SSL *ssl = SSL_new(tls_context);
    if (!ssl || !SSL_set_fd(ssl, fd)) fail("SSL_new");
    return links[fd] = ssl;
}

/* If the first byte that has come begins a handshake, the connection is one of TLS from here on. */
static inline void link_accept(int fd) {
    unsigned char first;
    if (tls_context && !links[fd] && recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && first == 0x16)
        SSL_set_accept_state(tls_link(fd));
}

/* Complete the handshake of a connection that blocks; it does not afterwards. */
static inline void link_connect(int fd) {
    if (!tls_context) return;
    if (SSL_connect(tls_link(fd)) != 1) fail("no handshake of TLS");
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

static inline ssize_t link_result(SSL *ssl, int result) {
    if (result > 0) return result;
    int error = SSL_get_error(ssl, result);
    if (error == SSL_ERROR_ZERO_RETURN) return 0;
    errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
    return -1;
}

/* As `send` and `recv` of a connection that does not block. At most INT_MAX bytes. */
static inline ssize_t link_send(int fd, const char *bytes, size_t n) {
    SSL *ssl = links[fd];
    return ssl ? link_result(ssl, SSL_write(ssl, bytes, (int)n)) : send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static inline ssize_t link_recv(int fd, char *bytes, size_t n) {
    SSL *ssl = links[fd];
    return ssl ? link_result(ssl, SSL_read(ssl, bytes, (int)n)) : recv(fd, bytes, n, MSG_DONTWAIT);
}

static inline void link_close(int fd) {
    if (links[fd]) {
        SSL_shutdown(links[fd]);
        SSL_free(links[fd]);
        links[fd] = NULL;
    }
    close(fd);
}

#else

static inline void tls_serve(const char *certificate, const char *key) {
    (void)certificate, (void)key;
    fail("compiled without TLS: there are no headers of OpenSSL");
}
static inline void tls_request(void) { fail("compiled without TLS: there are no headers of OpenSSL"); }
static inline void link_accept(int fd) { (void)fd; }
static inline void link_connect(int fd) { (void)fd; }
static inline ssize_t link_send(int fd, const char *bytes, size_t n) { return send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT); }
static inline ssize_t link_recv(int fd, char *bytes, size_t n) { return recv(fd, bytes, n, MSG_DONTWAIT); }
static inline void link_close(int fd) { close(fd); }

#endif
#endif
