# docker build -t xlcli .
# docker run --rm -it -u "$(id -u):$(id -g)" -v "$PWD:/work" xlcli train corpus.txt
#
# pip takes its indexes from the build arguments, such as one with the CPU build of PyTorch, which is much smaller:
# docker build --build-arg PIP_EXTRA_INDEX_URL=ADDRESS -t xlcli .

FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY . .
RUN python -m venv /opt/xlcli && /opt/xlcli/bin/pip install .

FROM python:3.11-slim
COPY --from=build /opt/xlcli /opt/xlcli
# Any user may run it; the cache of tokens lasts as long as the container.
ENV PATH=/opt/xlcli/bin:$PATH XLCLI_CACHE=/tmp/xlcli
WORKDIR /work
ENTRYPOINT ["xlcli"]
CMD ["--help"]
